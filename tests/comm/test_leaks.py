"""Communicators that come and go leave nothing behind, and hand out no view of a window."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from chainermn_comm import create_communicator
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.topology import Topology
from tests.support.models import Model, Param, with_grads
from tests.support.topologies import IMPOSED, NAMES

pytestmark = pytest.mark.world

WARM_UP = 50
# MPICH 5.0.2 itself keeps some 0.2 kB for each window that was freed.
KIB_EACH_TIME = 32
# Each so many times the number is noted that MPI gives to a new communicator: numbers are used
# again once their communicators are freed.
NOTED = 5
# MPICH has so many numbers for communicators that live at once.
MOST_COMMUNICATORS = 2046


def held() -> tuple[int, int, int, int]:
    """Memory maps, file descriptors and KiB of this process, and files in shared memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    maps = Path("/proc/self/maps").read_text().count("\n")
    return maps, len(os.listdir("/proc/self/fd")), kib, len(os.listdir("/dev/shm"))


def use(world, name: str, nodes: tuple[int, ...] | None, times: int) -> set[int]:
    """Make communicators, use and release them; the numbers noted meanwhile."""
    topology = None if nodes is None else Topology.of(nodes)
    numbers = set()
    for time in range(times):
        if time % NOTED == 0:
            own = world.Dup()
            numbers.add(own.py2f())
            own.Free()
        with make_communicator(name, topology=topology) as comm:
            comm.allreduce_grad(with_grads(w=np.ones(300, "f4")))
            with comm.split(0, 0) as part:
                part.allreduce_grad(with_grads(w=np.ones(300, "f4")))
    return numbers


KINDS = pytest.mark.parametrize(
    ("name", "several_nodes"),
    [(name, False) for name in (*NAMES, "dummy")]
    + [("hierarchical", True), ("two_dimensional", True)],
)


@pytest.mark.sizes(1, 2)  # more ranks than cores take minutes
@KINDS
def test_communicators_leak_nothing(world, name, several_nodes):
    check_leaks(world, name, several_nodes, 100)


@pytest.mark.full
@pytest.mark.sizes(1, 2)
@KINDS
def test_a_thousand_communicators_leak_nothing(world, name, several_nodes):
    # Two communicators each time: more than MPI has numbers for, if one of each were kept.
    check_leaks(world, name, several_nodes, MOST_COMMUNICATORS // 2 + WARM_UP)


def check_leaks(world, name: str, several_nodes: bool, times: int) -> None:
    nodes = IMPOSED[world.size][-1] if several_nodes else None
    use(world, name, nodes, WARM_UP)
    before = held()
    numbers = use(world, name, nodes, times)
    maps, files, kib, shared = (
        after - earlier for after, earlier in zip(held(), before, strict=True)
    )
    # One that stays each time would be as many as times; MPI's pools may grow a little, and
    # other jobs on this machine have files in shared memory too.
    assert maps < times / 4
    assert files < times / 4
    assert shared < times / 4
    assert kib < times * KIB_EACH_TIME
    assert len(numbers) < times / NOTED / 2


def shared_maps() -> list[tuple[int, int]]:
    """Addresses that this process shares with others."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, flags, *_ = line.split()
        if flags.endswith("s"):
            start, end = addresses.split("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def is_shared(array: np.ndarray) -> bool:
    return any(start <= array.ctypes.data < end for start, end in shared_maps())


@pytest.mark.sizes(2, 3, 4)
def test_the_test_sees_windows(world):
    from chainermn_comm.shared_window import SharedWindow

    window = SharedWindow(world, [4096] * world.size)
    assert all(is_shared(buffer) for buffer in window.buffers)
    window.close()


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_handed_out_lies_in_a_window(world, name, wire):
    with create_communicator(name, allreduce_grad_dtype=wire) as comm:
        readonly = np.ones(5, "f4")
        readonly.flags.writeable = False
        both = np.ones(3, "f4")
        grads = {
            "large": np.ones(600_000, "f4"),
            "scalar": np.ones((), "f4"),
            "empty": np.ones(0, "f4"),
            "transposed": np.ones((3, 4), "f4").T,
            "readonly": readonly,
            "one": both,
            "other": both,
        }
        model = with_grads(**grads)
        filled = Param(np.zeros(9, "f4"), np.ones(9, "f4") if world.rank else None)
        model = Model(**model.params, filled=filled)
        comm.allreduce_grad(model, zero_fill=True)
        results = [param.grad for param in model.params.values() if param.grad is not None]
        comm.bcast_data(model)
        results += [param.data for param in model.params.values()]
        results += [comm.allreduce(np.ones(70_000)), comm.bcast(np.ones(9)), comm.allgather(1.0)[0]]
        arrays = [array for array in results if isinstance(array, np.ndarray) and array.size]
        assert len(arrays) >= 14
        assert not any(is_shared(array) for array in arrays)
    for array in arrays:  # a view of the window would be a segmentation fault now
        array += 1


def mean_is_right(comm) -> None:
    model = with_grads(w=np.full(70_000, comm.rank, "f4"))
    comm.allreduce_grad(model)
    assert (model["w"].grad == (comm.size - 1) / 2).all()


@pytest.mark.parametrize("name", NAMES)
def test_finalize_leaves_others_alone(world, name):
    first, second = (create_communicator(name) for _ in range(2))
    part = first.split(0, -first.rank)
    for comm in (first, second, part):
        mean_is_right(comm)
    first.finalize()
    for comm in (second, part):
        mean_is_right(comm)
    third = create_communicator(name)
    for comm in (third, part, second):
        mean_is_right(comm)
        comm.finalize()


@pytest.mark.parametrize("name", NAMES)
def test_split_keeps_settings_and_an_imposed_topology(world, name):
    for nodes in IMPOSED[world.size]:
        if name == "single_node" and len(set(nodes)) > 1:
            continue
        topology = Topology.of(nodes)
        with make_communicator(name, allreduce_grad_dtype="float16", topology=topology) as comm:
            color = comm.rank % 2
            with comm.split(color, -comm.rank) as part, part.split(0, -part.rank) as again:
                members = list(range(color, comm.size, 2))
                assert again.allgather_obj(comm.rank) == members
                expected = Topology.of(nodes[rank] for rank in members)
                assert again.inter_size == expected.inter_size
                assert again.inter_rank == expected.inter_rank(again.rank)
                assert again.intra_rank == expected.intra_rank(again.rank)
                assert again.intra_size == expected.intra_size(again.rank)
                assert again.get_config() == comm.get_config()
                mean_is_right(again)
                mean_is_right(part)
            mean_is_right(comm)
