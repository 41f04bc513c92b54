"""What was made from a communicator is freed by all ranks together, once none of them uses it."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest

from chainermn_comm import create_communicator
from tests.support.jobs import runner
from tests.support.worlds.models import check_mean
from tests.support.worlds.topologies import algorithm_of


def used(comm):
    """A reference to memory that ranks share, which ``comm`` has from now on."""
    check_mean(comm, 70_000)
    return weakref.ref(algorithm_of(comm))


def is_there(comm, memory):
    """Whether ranks still have the memory, which they must agree on."""
    gc.collect()
    found = comm.allgather_obj(memory() is not None)
    assert len(set(found)) == 1
    return found[0]


def split(comm):
    comm.split(0, comm.rank).finalize()


@pytest.fixture
def parent(world):
    comm = create_communicator("hierarchical", world)
    yield comm
    comm.finalize()


def dropped(parent):
    return used(parent.split(parent.rank % 2, -parent.rank))


def dropped_in_a_cycle(parent):
    """A communicator of a communicator, which refers to itself."""
    part = parent.split(0, parent.rank).split(0, 0)
    part.itself = part
    return used(part)


@pytest.mark.world
@pytest.mark.parametrize(
    "drop",
    [
        dropped,
        dropped_in_a_cycle,
    ],
)
@pytest.mark.parametrize("then", ["split", "finalize"])
def test_what_no_rank_uses_is_freed_at_the_next_one(world, drop, then):
    parent = create_communicator("hierarchical", world)
    memory = drop(parent)
    assert is_there(parent, memory)  # as only all ranks together can free it
    if then == "split":
        split(parent)
        assert not is_there(parent, memory)
    parent.finalize()
    assert memory() is None


@pytest.mark.world
def test_one_that_create_communicator_made_is_freed_at_the_next_one(world):
    mine = world.Dup()
    memory = used(create_communicator("hierarchical", mine))
    with create_communicator("naive", mine) as comm:
        assert not is_there(comm, memory)
    mine.Free()


@pytest.mark.world
@pytest.mark.sizes(2, 3, 4)
def test_what_one_rank_still_uses_stays(parent):
    part = parent.split(0, parent.rank)
    memory = used(part)
    if parent.rank:
        del part
    split(parent)
    assert is_there(parent, memory)
    part = None
    split(parent)
    assert not is_there(parent, memory)


@pytest.mark.world
@pytest.mark.sizes(2, 3, 4)
def test_one_that_a_rank_has_left_by_an_exception_is_let_alone(parent):
    """Its memory can't be freed together any more, and nobody waits for that."""
    part = parent.split(0, parent.rank)
    used(part)
    if parent.rank == 0:
        with suppress(ZeroDivisionError), part:
            raise ZeroDivisionError
    del part
    for _ in range(2):
        memory = dropped(parent)
        split(parent)
        assert not is_there(parent, memory)


MANY = (
    runner.PRELUDE
    + """
from chainermn_comm import CommunicationError, create_communicator
comm = create_communicator("naive")
make = {
    "dropped": lambda: comm.split(0, comm.rank),
    "with their parents": lambda: comm.split(0, comm.rank).split(0, 0),
    "created": lambda: create_communicator("naive"),
}
for name, one in make.items():
    for _ in range(1100):
        try:
            part = one()
        except CommunicationError as error:
            print(name, error)
            break
kept = []
for one in make["dropped"], make["created"]:
    try:
        for _ in range(2100):
            kept.append(one())
    except CommunicationError as error:
        assert "finalize()" in str(error), error
        print("told")
    while kept:
        kept.pop().finalize()
assert comm.split(0, 0).allreduce_obj(1) == comm.size
print("well")
"""
)


@pytest.mark.full
def test_a_loop_makes_as_many_as_it_likes(tmp_path):
    """MPICH has 2,048; of those in use, one too many is an error that a script can catch."""
    script = tmp_path / "script.py"
    script.write_text(MANY)
    job = runner.run(2, script, seconds=120)
    assert job.returncode == 0, job
    assert sorted(job.out.split()) == ["told"] * 4 + ["well"] * 2, job
