"""`pseudo_connect` within one process."""

from __future__ import annotations

import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from numpy.testing import assert_array_equal

from chainermn_modelparallel import pseudo_connect


def test_values_and_gradients_pass_as_they_are():
    delegate = Variable(np.zeros((2, 2), np.float16))
    a = Variable(np.array([1.0, 2.0]))
    b = Variable(np.array(3.0, "f"))
    x, y = pseudo_connect(delegate, a, b)
    assert_array_equal(x.array, a.array)
    assert y.dtype == b.dtype
    assert y.shape == ()
    loss = F.sum(x * x) + F.cast(y, "d") * 5
    loss.backward()
    assert_array_equal(a.grad, [2.0, 4.0])
    assert b.grad == 5
    assert delegate.grad.dtype == np.float16
    assert_array_equal(delegate.grad, np.zeros((2, 2)))


def test_a_scalar_is_also_a_tuple_of_itself():
    """Scripts for 1.3 take the result, and those for Chainer 7 unpack it."""
    x = Variable(np.array([1.0, 2.0]))
    delegate = Variable(np.zeros(0, "f"))
    loss = pseudo_connect(delegate, F.sum(x))
    (unpacked,) = loss
    assert unpacked is loss
    assert loss[0] is loss
    assert loss[None].shape == (1,)
    with pytest.raises(IndexError):
        loss[1]
    (unpacked * 3).backward()
    assert_array_equal(x.grad, [3.0, 3.0])
    # Elsewhere a variable's elements stay what iterating gives.
    found = [each.array for each in pseudo_connect(delegate, x)]
    assert found == [1.0, 2.0]


def test_no_delegate_gives_what_an_empty_one_does():
    """As the last rank of an RNN has none, whose script is that of the others."""
    x = Variable(np.array([1.0, 2.0]))
    data = np.array([3, 4])
    y, z = pseudo_connect(None, x, data)
    assert_array_equal(z.array, data)
    assert not pseudo_connect(None, data).requires_grad
    F.sum(y**2).backward()
    assert_array_equal(x.grad, [2.0, 4.0])


def test_wrong_arguments_raise():
    variable = Variable(np.ones(1))
    with pytest.raises(TypeError, match=r"delegate_variable must be .*got ndarray"):
        pseudo_connect(np.ones(0), variable)
    with pytest.raises(TypeError, match="at least one actual variable"):
        pseudo_connect(variable)
    with pytest.raises(TypeError):
        pseudo_connect(variable, (variable, variable))
