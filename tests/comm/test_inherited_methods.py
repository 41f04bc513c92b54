"""What a class of the user's inherits says and does what our own communicators do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from chainermn_comm import RankMismatchError, create_communicator
from tests.support.oracles.samples import same
from tests.support.worlds.third_party import Inheriting

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


MAKERS = {
    "ours": lambda world: create_communicator("naive", world),
    "inherited": lambda world: Inheriting(world.Dup()),
}


@pytest.fixture(params=MAKERS)
def comm(request, world) -> Iterator[Any]:
    with MAKERS[request.param](world) as communicator:
        yield communicator


x = np.ones(3, "f4")


@pytest.mark.parametrize("root", [0, 1])
def test_roots_that_differ_are_told(comm, root):
    rows = [x] * comm.size
    for call in comm.scatter, comm.scatter_obj:
        with pytest.raises(RankMismatchError, match="root: 0 on rank 0; 1 on rank"):
            call(rows, root=min(comm.rank, 1))
    assert comm.scatter_obj("abc"[: comm.size], root=root) == "abc"[comm.rank]
    same(comm.scatter([x + i for i in range(comm.size)], root=root), x + comm.rank)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_and_lists_are_summed(comm, op, kind):
    def given(rank: int) -> Any:
        return kind([np.full((2, 3), rank, "f2"), rank + 0.5, np.arange(4) * rank])

    rows = [given(rank) for rank in range(comm.size)]
    reduced = {"sum": np.sum, "max": np.max, "min": np.min}[op]
    found = comm.allreduce(rows[comm.rank], op)
    assert type(found) is tuple
    for each, *terms in zip(found, *rows, strict=True):
        np.testing.assert_array_equal(each, reduced(np.stack(terms), axis=0))
        assert np.asarray(each).dtype == np.asarray(terms[0]).dtype
    assert comm.allreduce(kind([])) == ()


def test_tuples_that_differ_are_told(comm):
    last = comm.rank == comm.size - 1
    for data in ((x, x) if last else (x,), (x, x[:2]) if last else (x, x)):
        with pytest.raises(RankMismatchError, match=r"array.* on rank"):
            comm.allreduce(data)


def test_a_mean_of_large_numbers_is_no_infinity(comm):
    """Though their sum is one in float16."""
    sent = np.array([60000, 1, 0, comm.rank, np.inf], "f2")
    expected = np.array([60000, 1, 0, (comm.size - 1) / 2, np.inf], "f2")
    room = np.zeros(5, "f2")
    with np.errstate(all="raise"):
        found = comm.multi_node_mean(sent)
        assert comm.multi_node_mean(sent, room) is room
        assert comm.multi_node_mean(sent, sent) is sent  # over what is sent
    for each in found, room, sent:
        assert each.dtype == expected.dtype
        np.testing.assert_array_equal(each, expected)


def test_a_mean_of_tiny_numbers_is_no_zero(comm):
    for dtype in "f2", "f4":
        tiny = np.full(2, np.finfo(dtype).smallest_subnormal)
        np.testing.assert_array_equal(comm.multi_node_mean(tiny), tiny)


def test_a_mean_of_a_tuple_is_one(comm):
    found = comm.multi_node_mean((np.full(2, 60000, "f2"), 1.0, x))
    assert type(found) is tuple
    np.testing.assert_array_equal(found[0], np.full(2, 60000, "f2"))
    assert found[1] == 1
    np.testing.assert_array_equal(found[2], x)
