"""Communicators that come and go leave nothing behind, and hand out no view of a window."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.support.worlds.models import with_grads
from tests.support.worlds.shared_memory import is_in_shared_memory
from tests.support.worlds.topologies import ALGORITHMS, NAMES, by_name, on_nodes

pytestmark = pytest.mark.world

WARM_UP = 50
# MPICH 5.0.2 itself keeps some 0.2 kB for each window that was freed.
KIB_EACH_TIME = 32
# Each so many times the number is recorded that MPI gives to a new communicator:
# numbers are used again once their communicators are freed.
NOTED = 5
# MPICH has so many numbers for communicators that live at once.
MOST_COMMUNICATORS = 2046
APART = ("hierarchical", "two_dimensional")


def held() -> tuple[int, int, int, int]:
    """Memory maps, file descriptors and KiB of this process, and files in shared memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    maps = Path("/proc/self/maps").read_text().count("\n")
    return maps, len(os.listdir("/proc/self/fd")), kib, len(os.listdir("/dev/shm"))


def use(world, name: str, nodes: tuple[int, ...], times: int) -> set[int]:
    """Make communicators, use and release them; the numbers recorded meanwhile."""
    numbers = set()
    for time in range(times):
        if time % NOTED == 0:
            own = world.Dup()
            numbers.add(own.py2f())
            own.Free()
        with on_nodes(nodes, name) as comm:
            # Windows of the usual size take long to make.
            comm.set_config("chunk_bytes", 1 << 16)
            comm.allreduce_grad(with_grads(w=np.ones(300, "f4")))
            with comm.split(0, 0) as part:
                part.allreduce_grad(with_grads(w=np.ones(300, "f4")))
    return numbers


CHOSEN = [
    ("naive", False),
    ("hierarchical", False),
    ("hierarchical", True),
    ("dummy", False),
]
CASES = [
    *((name, False) for name in (*NAMES, "dummy")),
    *((name, True) for name in APART),
]


# More ranks than cores take minutes. The longer one makes more communicators than MPI
# has numbers for, if one were kept each time.
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize(
    ("name", "apart", "times"),
    [
        pytest.param(
            *case,
            times,
            marks=[] if times == 60 and case in CHOSEN else pytest.mark.full,
        )
        for times in (60, MOST_COMMUNICATORS // 2 + WARM_UP)
        for case in CASES
    ],
)
def test_communicators_leak_nothing(world, name, apart, times):
    nodes = tuple(range(world.size)) if apart else (0,) * world.size
    use(world, name, nodes, WARM_UP)
    before = held()
    numbers = use(world, name, nodes, times)
    maps, files, kib, shared = map(int.__sub__, held(), before)
    # One that stays each time would be as many as times; MPI's pools may grow a little,
    # and other jobs on this machine have files in shared memory too.
    assert max(maps, files, shared) < times / 4, (maps, files, shared)
    assert kib < times * KIB_EACH_TIME
    assert len(numbers) < times / NOTED / 2


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("name", by_name(*ALGORITHMS))
def test_nothing_handed_out_lies_in_a_window(world, name, wire):
    with create_communicator(name, allreduce_grad_dtype=wire) as comm:
        readonly, both = np.broadcast_to(np.float32(1), 5), np.ones(3, "f4")
        shapes = {"large": (600_000,), "scalar": (), "empty": (0,), "filled": (9,)}
        grads = {name: np.ones(shape, "f4") for name, shape in shapes.items()}
        grads |= {"transposed": np.ones((3, 4), "f4").T, "readonly": readonly}
        model = with_grads(**grads, one=both, other=both)
        if world.rank == 0:
            model["filled"].grad = None
        comm.allreduce_grad(model, zero_fill=True)
        results = [
            param.grad for param in model.params.values() if param.grad is not None
        ]
        comm.bcast_data(model)
        results += [param.data for param in model.params.values()]
        results += [
            comm.allreduce(np.ones(70_000)),
            comm.bcast(np.ones(9)),
            comm.allgather(1.0)[0],
        ]
        arrays = [
            array for array in results if isinstance(array, np.ndarray) and array.size
        ]
        assert len(arrays) >= 14
        assert not any(is_in_shared_memory(array) for array in arrays)
    for array in arrays:  # a view of the window would be a segmentation fault now
        array += 1
