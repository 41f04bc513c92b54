"""Every plan gives the mean over any topology, to the last bit the same on all ranks and again."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from chainermn_comm import node_stream, shared_window
from chainermn_comm.agreement import Agreement
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.chunks import SMALL, cut
from chainermn_comm.plans import LARGE_BYTES
from chainermn_comm.settings import CHUNK_VARIABLE
from chainermn_comm.shared_window import SharedWindow
from chainermn_comm.topology import Topology
from tests.support.models import Model, Param, with_grads
from tests.support.topologies import IMPOSED, telling

pytestmark = pytest.mark.world

NAMES = ("naive", "flat", "hierarchical", "two_dimensional", "single_node", "non_cuda_aware")
TOPOLOGIES = max(map(len, IMPOSED.values()))
# Ranks draw the same examples only if nothing but the test's name decides.
LOCKSTEP: dict[str, Any] = {"derandomize": True, "database": None, "deadline": None}
# Of gradients and of wires; the first three are those that GPUs have, too.
DTYPES = ("float16", "float32", "float64", "bfloat16")
# By so many powers of ten an array's numbers differ from its exponent, up and down.
SPREADS = (0, 0, 2, 6, 25)
LAYOUTS = ("C", "F", "reversed", "read-only", "strided", "stride 0", "shared", "overlapping")


@dataclass(frozen=True)
class Entry:
    """One parameter: what its gradient is on the ranks that have it.

    Attributes:
        missing: the ranks that have none, where missing ones are filled with zeros.
        exponent, spread: powers of ten; see `gradient`.
        nowhere: whether no rank has one.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str
    missing: frozenset[int]
    exponent: int
    spread: int = 0
    nowhere: bool = False


def models(
    huge: list[tuple[int, ...]],
    copies: int,
    dtypes: Sequence[str] = DTYPES,
    spreads: Sequence[int] = SPREADS,
) -> st.SearchStrategy[list[Entry]]:
    """Models of a few arrays, of which some may be huge, and of up to so many small ones."""
    small = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9)

    def entries(shapes: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Entry]:
        return st.builds(
            Entry,
            shapes,
            st.sampled_from(dtypes),
            st.sampled_from(LAYOUTS),
            st.frozensets(st.integers(0, 3), max_size=3),
            st.integers(-3, 3),
            st.sampled_from(spreads),
            st.sampled_from([False] * 5 + [True]),
        )

    few = st.lists(entries(small | st.sampled_from([*huge, (1,), (4096,)])), max_size=7)
    alike = st.builds(
        lambda entry, count: [entry] * count,
        entries(small | st.just((4096,))),
        st.integers(copies // 3, copies),
    )
    # Missing on different ranks, so that arrays in the same memory get different means.
    twins = st.builds(
        lambda entry, layout, missing: [entry, replace(entry, layout=layout, missing=missing)],
        entries(small | st.sampled_from([*huge, (4096,)])),
        st.sampled_from(["shared", "overlapping"]),
        st.frozensets(st.integers(0, 3), max_size=3),
    )
    return few | alike | twins


MODELS = models([(300_001,), (700, 600)], 90)


@cache
def communicator(name: str, nodes: tuple[int, ...]):
    """Kept for the whole run: chunks go on from call to call."""
    return make_communicator(name, topology=Topology.of(nodes))


def gradient(entry: Entry, index: int, rank: int) -> np.ndarray:
    rng = np.random.default_rng([index, rank, *entry.shape])
    values, largest = rng.standard_normal(entry.shape), float(ml_dtypes.finfo(entry.dtype).max)
    powers = entry.exponent + entry.spread * rng.uniform(-1, 1, entry.shape)
    array = np.asarray(np.clip(values * 10.0**powers, -largest, largest)).astype(entry.dtype)
    if entry.layout == "F" and array.ndim:
        return np.asfortranarray(array)
    if entry.layout == "reversed" and array.ndim:
        return array[::-1]
    if entry.layout == "strided" and array.ndim:
        return np.repeat(array, 2, axis=0)[::2]
    if entry.layout == "read-only":
        array.flags.writeable = False
    if entry.layout == "stride 0" and array.size:
        return np.lib.stride_tricks.as_strided(array, array.shape, (0,) * array.ndim)
    return array


def gradients(entries: Sequence[Entry], rank: int) -> list[np.ndarray]:
    """A rank's gradients; some are, or overlap, the one before."""
    found: list[np.ndarray] = []
    for index, entry in enumerate(entries):
        array = gradient(entry, index, rank)
        if found and found[-1].dtype == array.dtype:
            before = found[-1]
            if entry.layout == "shared" and before.shape == array.shape:
                array = before
            if entry.layout == "overlapping" and before.size >= array.size:
                first = int(before.size > array.size)
                array = before.reshape(-1)[first : first + array.size].reshape(array.shape)
        found.append(array)
    return found


def has(entry: Entry, rank: int, zero_fill: bool) -> bool:
    return not entry.nowhere and not (zero_fill and rank in entry.missing)


def exact_mean(entries, grads, index, zero_fill):
    """The mean in float64, and the mean of absolute values; None where no rank has one."""
    entry, size = entries[index], len(grads)
    having = [rank for rank in range(size) if has(entry, rank, zero_fill)]
    if not having:
        return None
    terms = [grads[rank][index].astype("f8") for rank in having]
    return sum(terms) / size, sum(map(np.abs, terms)) / size


def assert_within_rounding(comm, entries, grads, wire, zero_fill) -> None:
    """The bound also says that no mean of two smallest numbers and more has become zero."""
    before = [gradients(entries, rank) for rank in range(comm.size)]
    for index, (entry, grad) in enumerate(zip(entries, grads, strict=True)):
        expected = exact_mean(entries, before, index, zero_fill)
        if expected is None:
            assert grad is None
            continue
        mean, scale = expected
        infos = [ml_dtypes.finfo(dtype) for dtype in (entry.dtype, wire or entry.dtype)]
        bound = 4 * max(float(info.eps) for info in infos) * scale
        bound += max(float(info.smallest_subnormal) for info in infos)
        # Of a mean that its dtypes don't hold nothing is said.
        holds = np.abs(mean) + bound <= min(float(info.max) for info in infos)
        assert grad.dtype == entry.dtype
        assert grad.shape == entry.shape
        assert np.all(np.abs(grad.astype("f8") - mean)[holds] <= bound[holds])


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


def digest(grads: list) -> str:
    """Of which gradients there are, and of their bits."""
    found = hashlib.sha1()
    for grad in grads:
        found.update(b"none" if grad is None else grad.tobytes())
        found.update(b"next")
    return found.hexdigest()


def check_model(comm, run, entries, wire, zero_fill) -> None:
    """Take the mean twice by ``run``; ranks agree on what they find, so they stay in step."""
    comm.set_config("allreduce_grad_dtype", wire)
    grads = run()
    problem = None
    try:
        assert_within_rounding(comm, entries, grads, wire, zero_fill)
        assert digest(run()) == digest(grads)
    except AssertionError as error:
        problem = str(error)
    views = comm.allgather_obj((digest(grads), problem))
    assert all(view[0] == views[0][0] for view in views)
    assert not any(view[1] for view in views), views


def check_models(world, name, examples) -> None:
    topologies = [n for n in IMPOSED[world.size] if name != "single_node" or len(set(n)) == 1]

    twin = Entry((9,), "float32", "C", frozenset(), 0)
    twins = [twin, replace(twin, layout="shared", missing=frozenset({0}))]

    @settings(max_examples=examples, **LOCKSTEP)
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
