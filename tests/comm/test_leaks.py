"""Communicators that come and go leave nothing behind, and hand out no view of a window."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.comm.inside import is_in_shared_memory
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import ALGORITHMS, by_name, on_nodes

pytestmark = pytest.mark.world

WARM_UP = 50
# MPICH 5.0.2 itself keeps some 0.2 kB for each window that was freed.
KIB_EACH_TIME = 32
# Each so many times the number is recorded that MPI gives to a new communicator:
# numbers are used again once their communicators are freed.
NOTED = 5
# With two communicators each time, these are more than the 2,046 that MPICH can have.
MANY = 1100


def held():
    """Memory maps, file descriptors and KiB of this process, and files in shared memory."""
    status = Path("/proc/self/status").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    maps = Path("/proc/self/maps").read_text().count("\n")
    return maps, len(os.listdir("/proc/self/fd")), kib, len(os.listdir("/dev/shm"))


def use(world, name, nodes, times):
    """Make communicators, use and release them; the numbers recorded meanwhile."""
    numbers = set()
    for time in range(times):
        if time % NOTED == 0:
            own = world.Dup()
            numbers.add(own.py2f())
            own.Free()
        with on_nodes(nodes, name) as comm, comm.split(0, 0) as part:
            for each in (comm, part):
                # Windows of the usual size take long to make.
                each.set_config("chunk_bytes", 1 << 16)
                each.allreduce_grad(with_grads(w=np.ones(300, "f4")))
    return numbers


# More ranks than cores take minutes. The longer one makes more communicators than MPI
# has numbers for, if one were kept each time.
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("times", [60, pytest.param(MANY, marks=pytest.mark.full)])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", ["naive", "hierarchical", "two_dimensional"])
def test_communicators_leak_nothing(world, name, nodes, times):
    where = [rank % nodes for rank in range(world.size)]
    use(world, name, where, WARM_UP)
    before = held()
    numbers = use(world, name, where, times)
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
        model = with_grads(
            large=np.ones(600_000, "f4"),
            transposed=np.ones((3, 4), "f4").T,
            readonly=np.broadcast_to(np.float32(1), 5),
        )
        comm.allreduce_grad(model)
        comm.bcast_data(model)
        params = model.params.values()
        arrays = [
            *[param.grad for param in params],
            *[param.data for param in params],
            comm.allreduce(np.ones(70_000)),
            comm.bcast(np.ones(9)),
            *comm.allgather(np.ones(9)),
        ]
        for array in arrays:
            assert not is_in_shared_memory(array)
    for array in arrays:  # a view of the window would be a segmentation fault now
        array += 1
