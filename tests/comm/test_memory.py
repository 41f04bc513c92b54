"""The memory that taking the mean of gradients needs does not grow with the model."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from chainermn_comm.catalogue import make_communicator
from chainermn_comm.topology import Topology

from .conftest import NAMES
from .models import Model, Param

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]

MIB = 1 << 20
PARAMETERS = 10
# A few chunks: of what NumPy allocates, for any model. Windows come on top, and don't grow.
FEW_CHUNKS = 16 * MIB


def extra_bytes(comm, megabytes: int, transposed: bool = False) -> int:
    """The most that NumPy held during a call, beside what it held before.

    The model has arrays of equal size and some tiny ones; `transposed` makes one of them so.
    """
    side = int((megabytes * MIB / 4 / PARAMETERS) ** 0.5)
    grads = {f"p{i}": np.ones((side, side), "f4") for i in range(PARAMETERS)}
    if transposed:
        grads["p0"] = grads["p0"].T
    grads |= {f"tiny{i}": np.ones(i, "f4") for i in range(50)}
    # The gradients stand in for the parameters too, which only lend shape and dtype.
    model = Model(**{name: Param(grad, grad) for name, grad in grads.items()})
    del grads
    gc.collect()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    comm.allreduce_grad(model)
    _, peak = tracemalloc.get_traced_memory()
    return peak - before


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize(
    ("name", "nodes"),
    [(name, (0, 0)) for name in NAMES] + [("hierarchical", (0, 1)), ("two_dimensional", (0, 1))],
)
def test_extra_memory_does_not_grow_with_the_model(world, traced, name, nodes, wire):
    with make_communicator(name, topology=Topology.of(nodes), allreduce_grad_dtype=wire) as comm:
        extra_bytes(comm, 4)  # what is made at first use
        small, large = extra_bytes(comm, 4), extra_bytes(comm, 200)
        if world.rank == 0:
            print(f"{name} {nodes} {wire}: {small / MIB:.2f} MiB, {large / MIB:.2f} MiB")
        assert large < FEW_CHUNKS
        # An array takes 20 MB in the large model: not even one of them is copied.
        assert large - small < 8 * MIB


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_a_gradient_that_is_replaced_takes_its_own_size_and_a_copy(world, traced, name):
    with make_communicator(name) as comm:
        extra_bytes(comm, 4)
        replaced = 200 * MIB / PARAMETERS
        assert extra_bytes(comm, 200, transposed=True) < 2 * replaced + FEW_CHUNKS
