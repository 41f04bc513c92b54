"""Every plan gives the mean over any topology, to the last bit the same on all ranks and again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chainermn_comm import node_stream, shared_window
from chainermn_comm.agreement import Agreement
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.chunks import SMALL, cut
from chainermn_comm.plans import LARGE_BYTES
from chainermn_comm.settings import CHUNK_VARIABLE
from chainermn_comm.shared_window import SharedWindow
from chainermn_comm.topology import Topology
from tests.support.drawn_models import DTYPES, Entry, check_model, gradients, has, models
from tests.support.models import Model, Param, with_grads
from tests.support.topologies import IMPOSED, telling

pytestmark = pytest.mark.world

NAMES = ("naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware")
TOPOLOGIES = max(map(len, IMPOSED.values()))
MODELS = models([(300_001,), (700, 600)], 90)


@cache
def communicator(name: str, nodes: tuple[int, ...]):
    """Kept for the whole run: chunks go on from call to call."""
    return make_communicator(name, topology=Topology.of(nodes))


def run(comm, entries, zero_fill) -> list:
    model = Model(
        **{
            f"p{index:03}": Param(
                np.zeros(entry.shape, entry.dtype),
                grad if has(entry, comm.rank, zero_fill) else None,
            )
            for index, (entry, grad) in enumerate(
                zip(entries, gradients(entries, comm.rank), strict=True)
            )
        }
    )
    comm.multi_node_mean_grad(model, zero_fill)
    return [param.grad for param in model.params.values()]


def check_models(world, name, examples) -> None:
    topologies = [n for n in IMPOSED[world.size] if name != "single_node" or len(set(n)) == 1]

    twin = Entry((9,), "float32", "C", frozenset(), 0)
    twins = [twin, replace(twin, layout="shared", missing=frozenset({0}))]

    @settings(max_examples=examples)
    @example(twins, topologies[0], None, True)
    @given(
        MODELS,
        st.sampled_from(topologies),
        st.sampled_from([None, *DTYPES]),
        st.booleans(),
    )
    def check(entries, nodes, wire, zero_fill):
        comm = communicator(name, nodes)
        check_model(comm, lambda: run(comm, entries, zero_fill), entries, wire, zero_fill)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_any_model_over_any_topology(world, name):
    check_models(world, name, 25)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_any_model_over_any_topology_at_length(world, name):
    check_models(world, name, 200)


def back_to_back(monkeypatch, comm, calls: int) -> None:
    """Models of 1, 2 and 3 chunks in turn, no barrier of the test's own between calls."""
    comm.set_config("allreduce_grad_dtype", None)  # others use the communicator too
    size = 70_000
    assert node_stream.CHUNK_BYTES // SMALL < 4 * size < LARGE_BYTES  # a chunk each, in the window
    chunks = []

    def counting(*args):
        found = cut(*args)
        chunks.append(len(found))
        return found

    monkeypatch.setattr(node_stream, "cut", counting)
    for call in range(calls):
        model = with_grads(
            **{f"p{i}": np.full(size, comm.rank + call + i, "f4") for i in range(call % 3 + 1)}
        )
        comm.allreduce_grad(model)
        for i, param in enumerate(model.params.values()):
            assert (param.grad == np.float32(call + i + (comm.size - 1) / 2)).all()
    assert chunks == ([] if comm.size == 1 else [call % 3 + 1 for call in range(calls)])


@pytest.mark.parametrize("nodes_at", range(TOPOLOGIES))
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_back_to_back_with_delays(world, monkeypatch, name, nodes_at):
    topologies = telling(name, world.size)
    if nodes_at < len(topologies):
        plant_delays(world, monkeypatch, 0.05)
        back_to_back(monkeypatch, communicator(name, topologies[nodes_at]), 60)


# A call takes 0.5 ms with two ranks on two idle cores and 1.5 with three, but 7 with four, which
# take turns in waiting: a minute for each topology.
@pytest.mark.full
@pytest.mark.parametrize("nodes_at", range(TOPOLOGIES))
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_ten_thousand_calls_back_to_back(world, monkeypatch, name, nodes_at):
    topologies = telling(name, world.size)
    if nodes_at < len(topologies):
        plant_delays(world, monkeypatch, 0.002)
        back_to_back(monkeypatch, communicator(name, topologies[nodes_at]), 10_000)


def plant_delays(world, monkeypatch, likelihood: float) -> None:
    """Now and then a rank comes late to a meeting, or goes late from it."""
    rng = random.Random(world.rank)

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            pause()
            result = method(*args, **kwargs)
            pause()
            return result

        return call

    def pause() -> None:
        if rng.random() < likelihood:
            time.sleep(rng.random() * 0.004)

    # The agreement is the first meeting of a call.
    monkeypatch.setattr(SharedWindow, "meet", late(SharedWindow.meet))
    monkeypatch.setattr(Agreement, "__call__", late(Agreement.__call__))


def check_mean(world, comm, calls: int = 2) -> None:
    for _ in range(calls):
        model = with_grads(w=np.full(9, float(world.rank)))
        comm.allreduce_grad(model)
        np.testing.assert_array_equal(model["w"].grad, np.full(9, (world.size - 1) / 2))


@pytest.mark.parametrize("nodes_at", range(TOPOLOGIES))
@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("has_room", "no room for shared memory in /dev/shm on some node"),
        ("take_pages", "no room for shared memory in /dev/shm on some node"),
        ("__init__", "shared memory could not be allocated on some node: no such memory"),
        ("is_shared", "the memory that MPI calls shared is not, on some node"),
    ],
)
def test_where_one_node_has_no_window_mpi_serves_and_one_line_says_why(
    world, monkeypatch, capfd, nodes_at, what, line
):
    if nodes_at >= len(IMPOSED[world.size]):
        return
    unlucky = world.rank == world.size - 1
    real: Any = getattr(SharedWindow, what, None)

    def fail(*args):
        result = real(*args)
        if unlucky and what == "__init__":
            raise MemoryError("no such memory")
        return result and not unlucky

    if what == "has_room":
        monkeypatch.setattr(shared_window, "has_room", lambda _: not unlucky)
    else:
        monkeypatch.setattr(SharedWindow, what, fail)
    topology = Topology.of(IMPOSED[world.size][nodes_at])
    with make_communicator("hierarchical", topology=topology) as comm:
        check_mean(world, comm)
    said = capfd.readouterr().err
    expected = f"ChainerMN: {line}; gradients go through MPI instead\n"
    assert said.count(expected) == said.count("ChainerMN") == (world.rank == 0 and world.size > 1)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "complex256"])
def test_the_widest_numbers_in_the_smallest_chunks(world, monkeypatch, dtype):
    monkeypatch.setenv(CHUNK_VARIABLE, "64")
    for nodes in IMPOSED[world.size]:
        with make_communicator("two_dimensional", topology=Topology.of(nodes)) as comm:
            for size in (1, 2, 3, 41):
                rows = [np.arange(size) * (1 + 2j) + 12 * rank for rank in range(comm.size)]
                model = with_grads(w=rows[comm.rank].astype(dtype))
                comm.allreduce_grad(model)
                np.testing.assert_array_equal(model["w"].grad, sum(rows) / comm.size)


def test_memory_that_is_not_shared_is_noticed(world):
    window = SharedWindow(world, [64] * world.size)
    assert window.is_shared()
    if world.rank:
        window.buffers[0] = np.zeros(64, np.uint8)  # as if this rank mapped something else
    assert window.is_shared() == (world.size == 1)
    window.close()
