"""The memory that taking the mean of gradients needs does not grow with the model."""

from __future__ import annotations

import gc
import tracemalloc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chainermn_comm.catalogue import make_communicator
from chainermn_comm.in_place import InPlace
from chainermn_comm.reducer import Direct
from chainermn_comm.topology import Topology
from chainermn_comm.transports.mpi import MpiTransport
from tests.support.models import Model, Param

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 4)]

MIB = 1 << 20
# Half of a model's bytes are in so many large arrays, the others in small ones, packed together.
PARAMETERS = 5
SMALL_BYTES = 1 << 16
# A few chunks: of what NumPy allocates, for any model. Windows come on top, and don't grow.
FEW_CHUNKS = 16 * MIB


def extra_bytes(comm, megabytes: int, transposed: bool = False) -> int:
    """The most that NumPy held during a call, beside what it held before.

    `transposed` makes one of the model's large arrays so.
    """
    side = int((megabytes * MIB / 2 / 4 / PARAMETERS) ** 0.5)
    grads: dict[str, np.ndarray] = {f"p{i}": np.ones((side, side), "f4") for i in range(PARAMETERS)}
    if transposed:
        grads["p0"] = grads["p0"].T
    count = megabytes * MIB // 2 // SMALL_BYTES
    grads |= {f"small{i:04}": np.ones(SMALL_BYTES // 4, "f4") for i in range(count)}
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


# The other names take, on one node, the way of the last.
TOGETHER = [(name, "together") for name in ("naive", "flat", "hierarchical")]
AMONG_NODES = [
    (name, nodes) for name in ("hierarchical", "two_dimensional") for nodes in ("apart", "in pairs")
]


def topology(nodes: str, size: int) -> Topology:
    """On which node each rank is."""
    every = {
        "together": (0,) * size,
        "apart": tuple(range(size)),
        "in pairs": tuple(rank * 2 // size for rank in range(size)),
    }
    return Topology.of(every[nodes])


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize(("name", "nodes"), TOGETHER + AMONG_NODES)
def test_extra_memory_does_not_grow_with_the_model(world, traced, name, nodes, wire):
    where = topology(nodes, world.size)
    with make_communicator(name, topology=where, allreduce_grad_dtype=wire) as comm:
        first = extra_bytes(comm, 100)  # with what is made at first use
        small, large = extra_bytes(comm, 4), extra_bytes(comm, 100)
        if world.rank == 0:
            print(
                f"{name} {nodes} {wire}: {first / MIB:.2f} MiB at first, then "
                f"{small / MIB:.2f} and {large / MIB:.2f} MiB"
            )
        assert max(first, large) < FEW_CHUNKS
        # An array takes 10 MB in the large model, and the small ones 50 MB: not even one of the
        # former is copied, nor a fifth of the latter.
        assert large - small < 8 * MIB


@pytest.mark.parametrize("way", ["transport", "in place"])
@pytest.mark.parametrize(("size", "limit"), [(2, 1), (4, 1), (9, 1), (100, 1), (1000, 2)])
def test_what_is_received_hardly_grows_with_the_number_of_ranks(
    world, traced, monkeypatch, way, size, limit
):
    # One of many ranks: only how much room it makes for the others' numbers counts here.
    for of in MpiTransport, InPlace:
        monkeypatch.setattr(of, "_exchange", lambda *_: [])
    comm: Any = SimpleNamespace(rank=1, size=size, Dup=lambda: comm)
    reducer = Direct(MpiTransport(comm, 0), False) if way == "transport" else InPlace(comm)
    grad = np.zeros(20 * MIB, "f4")
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    reducer.mean([grad], [grad], [grad.dtype])
    _, peak = tracemalloc.get_traced_memory()
    if world.rank == 0:
        print(f"{way}, {size} ranks: {(peak - before) / MIB:.2f} MiB")
    assert MIB / 2 < peak - before < limit * FEW_CHUNKS


@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_a_gradient_that_is_replaced_takes_its_own_size_and_a_copy(world, traced, name):
    with make_communicator(name) as comm:
        extra_bytes(comm, 4)
        replaced = 100 * MIB / 2 / PARAMETERS
        assert extra_bytes(comm, 100, transposed=True) < 2 * replaced + FEW_CHUNKS
