"""What was received by a GPU is of another array class than a delegate that was made without."""

from __future__ import annotations

import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from numpy.testing import assert_array_equal

from chainermn_modelparallel import pseudo_connect, recv, send
from tests.modelparallel.device_arrays import Device, received_on_devices

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]


@pytest.fixture(autouse=True)
def devices(comm):
    with received_on_devices(comm):
        with pytest.raises(TypeError, match="mixed"):
            F.add(np.ones(2), np.ones(2).view(Device))
        yield


def device(*shape):
    return Variable(np.ones(shape, "f").view(Device))


def test_arrays_of_cpu_and_gpu_are_not_sent_together(comm):
    data = (device(2), Variable(np.ones(2, "f")))
    with pytest.raises(TypeError, match="incompatible array types are mixed"):
        send(data, comm, 1 - comm.rank)


@pytest.mark.parametrize("kind", [np.ndarray, Device])
def test_a_delegate_of_either_class_is_reached(comm, kind):
    if comm.rank == 0:
        x = Variable(np.ones(3, "f").view(kind))
        y = recv(comm, 1, delegate_variable=send(x, comm, 1))
        assert type(y.array) is Device
        pseudo_connect(Variable(np.zeros(0, "f")), F.sum(y)).backward()
        assert_array_equal(x.grad, [5, 5, 5])
    else:
        send(recv(comm, 0) * 5, comm, 0).backward()


def test_pseudo_connect_reaches_a_delegate_of_another_class():
    delegate = Variable(np.ones(2, np.float16))
    x = device(2)
    F.sum(pseudo_connect(delegate * 1, x) * 3).backward()
    assert_array_equal(delegate.grad, np.zeros(2))
    assert_array_equal(x.grad, [3, 3])
    loss = pseudo_connect(x * 1, Variable(np.ones((), "f")))
    x.cleargrad()
    loss.backward()
    assert_array_equal(x.grad, [0, 0])
