"""Means that travel in 16 bits: no needless infinity, and no needless zero."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from ml_dtypes import finfo
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import on_nodes, over_nodes

pytestmark = [
    pytest.mark.world,
    over_nodes("flat", "hierarchical", "two_dimensional"),
]

COUNT = 3000
# Numbers by their lowest and highest power of two.
POWERS = {
    "any": (-24, 15.99),
    "a few small": (-24, -21.5),
    "below normal": (-24, -14),
    "too small": (-40, -24),
    "tiny": (-70, -69),
    "too large": (16, 100),
}
IN_FLOAT16 = ("any", "a few small", "below normal")


def numbers(kind, rank, dtype):
    """Numbers of one kind: a fifth are zeros, and three fourths have the same sign on all ranks."""
    random = default_rng([rank, len(kind)])
    signs = default_rng(len(kind)).choice([-1, 1], COUNT)
    signs[::4] = random.choice([-1, 1], len(signs[::4]))
    size = 2 ** random.uniform(*POWERS[kind], COUNT)
    size[random.random(COUNT) < 0.2] = 0
    return (signs * size).astype(dtype)


def check(comm, rows, wire):
    """Assert that the mean is near, and finite and other than 0 where the exact one is."""
    own = rows[0].dtype
    model = with_grads(w=rows[comm.rank].copy())
    comm.allreduce_grad(model)
    found = model["w"].grad.astype("f8")
    terms = np.array(rows).astype("f8")
    exact = terms.mean(0)
    scale = abs(terms).mean(0)
    # Numbers that travel together share an exponent, which is that of their largest;
    # those of which one is beyond 2^11 travel in float32.
    shared = min(abs(terms).max(), 2.0**11) * 2.0**-37
    smallest = max(float(finfo(own).smallest_subnormal), shared)
    eps = max(float(finfo(wire).eps), float(finfo(own).eps))
    bound = smallest + 2 * eps * scale
    largest = float(np.finfo("f4").max)  # of sums
    fits = abs(exact) <= float(finfo(own).max)
    holds = fits & (abs(terms.sum(0)) <= largest)
    assert np.all(abs(found - exact)[holds] <= bound[holds])
    # Where terms cancel, the order of a sum decides what is left of the small ones.
    alike = np.all(terms >= 0, axis=0) | np.all(terms <= 0, axis=0)
    assert np.all(found[alike & (abs(exact) > smallest)] != 0)
    assert np.all(found[alike & (exact == 0)] == 0)


@pytest.mark.parametrize("way", [nullcontext, by_circulant])
def test_means_are_as_exact_as_16_bits_are_wherever_numbers_lie(
    world, name, nodes, way
):
    with (
        way(),
        on_nodes(nodes, name, allreduce_grad_dtype="float16") as comm,
    ):
        for kind, own in product(POWERS, ("f2", "f4", "f8")):
            if own == "f2" and kind not in IN_FLOAT16:
                continue
            rows = [numbers(kind, rank, own) for rank in range(world.size)]
            check(comm, rows, "float16")
        # One number that is too large among small ones.
        rows = [numbers("too small", rank, "f4") for rank in range(world.size)]
        rows[0][7] = 1e30
        check(comm, rows, "float16")


@pytest.mark.parametrize(
    ("own", "wire"),
    [
        *(("bfloat16", "bfloat16"), ("float32", "bfloat16")),
        # As the other type their largest numbers would be infinite, there or back
        # again.
        *(("float16", "bfloat16"), ("bfloat16", "float16")),
    ],
)
def test_means_at_the_end_of_the_range_are_finite(world, name, nodes, own, wire):
    narrowest = own
    if own == "float32":
        narrowest = wire
    narrow = float(finfo(narrowest).max)
    beside = 2.0 ** math.frexp(narrow / 2)[1]  # a sum that 16 bits don't hold
    largest = float(finfo(own).max)
    rest = [0.0] * (world.size - 2)
    with on_nodes(nodes, name, allreduce_grad_dtype=wire) as comm:
        for terms in (
            [narrow / 2, beside, *rest],
            [largest, -largest, *rest],
            [largest, 0.0, *rest],
            [largest] * world.size,
        ):
            arrays = [np.full(9, term).astype(own) for term in terms]
            check(comm, arrays, wire)
        model = with_grads(w=np.array([np.nan, np.inf, 1], own))
        comm.allreduce_grad(model)
        mean = model["w"].grad.astype("f8")
        assert_array_equal(mean, [np.nan, np.inf, 1])
