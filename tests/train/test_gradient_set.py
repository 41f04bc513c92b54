"""Products of gradients with a factor."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from chainermn_train.optimizers.gradient_set import Gradient, multiply_gradients


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize(
    ("dtype", "product"),
    [
        (np.float16, np.float16(4e-4)),
        (np.float32, np.float32(40000) * np.float32(1e-8)),
        (np.float64, 40000 * 1e-8),
    ],
)
def test_a_factor_that_sixteen_bits_take_for_zero_counts(shape, dtype, product):
    gradient = Gradient("", None, np.full(shape, 40000, dtype))
    multiply_gradients([gradient], 1e-8)
    assert gradient.grad.dtype == dtype
    assert_array_equal(gradient.grad, np.full(shape, product), strict=True)
