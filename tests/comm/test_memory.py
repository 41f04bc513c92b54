"""The memory that taking the mean of gradients needs does not grow with the model."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.support.worlds.circulant import most_bytes
from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 4)]

MIB = 1 << 20
# Half of a model's bytes are in so many large arrays, the others in small ones, packed
# together.
PARAMETERS = 5
SMALL = 1 << 14
# A few chunks: of what NumPy allocates, for any model. Windows come on top, and don't
# grow.
FEW_CHUNKS = 16 * MIB


def extra_bytes(comm, megabytes, transposed=False):
    """The most that NumPy held during a call, beside what it held before.

    `transposed` makes one of the model's large arrays so.
    """
    half = megabytes * MIB // 8  # in elements
    params = {}
    for i in range(PARAMETERS):
        grad = np.ones((2, half // PARAMETERS // 2), "f4")
        # The gradients stand in for the parameters too, which lend shape and dtype.
        params[f"p{i}"] = Param(grad, grad)
    for i in range(half // SMALL):
        grad = np.ones(SMALL, "f4")
        params[f"small{i:04}"] = Param(grad, grad)
    if transposed:
        params["p0"].grad = params["p0"].data = params["p0"].grad.T
    model = Model(**params)
    gc.collect()
    return most_bytes(lambda: comm.allreduce_grad(model))


# The other names take, on one node, the algorithm of `hierarchical`.
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("naive", 1),
        ("flat", 1),
        ("hierarchical", 1),
        ("hierarchical", 4),
        pytest.param("two_dimensional", 2, marks=pytest.mark.sizes(4)),
    ],
)
@pytest.mark.parametrize("wire", [None, "float16"])
def test_extra_memory_does_not_grow_with_the_model(world, name, nodes, wire):
    where = [rank % nodes for rank in range(world.size)]
    with on_nodes(where, name, allreduce_grad_dtype=wire) as comm:
        first = extra_bytes(comm, 100)  # with what is made at first use
        small = extra_bytes(comm, 4)
        large = extra_bytes(comm, 100)
        assert max(first, large) < FEW_CHUNKS
        # An array takes 10 MB in the large model, and the small ones 50 MB: not even
        # one of the former is copied, nor a fifth of the latter.
        assert large - small < 8 * MIB
