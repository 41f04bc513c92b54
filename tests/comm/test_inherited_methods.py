"""What a class of the user's inherits says and does what our own communicators do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
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


LARGE = {
    "f2": 60000,
    "f4": 3e38,
    "f8": 1.7e308,
    ml_dtypes.bfloat16: 3e38,
    "c8": 3e38 + 1j,
    "c16": 1.7e308 - 1j,
}


@pytest.mark.parametrize("dtype", LARGE, ids=str)
def test_a_mean_of_large_numbers_is_no_infinity(comm, dtype):
    # NumPy divides a complex infinity into NaNs.
    most = 1 if np.dtype(dtype).kind == "c" else np.inf
    sent = np.array([LARGE[dtype], 1, 0, comm.rank, most], dtype)
    expected = np.array([LARGE[dtype], 1, 0, (comm.size - 1) / 2, most], dtype)
    room = np.zeros(5, dtype)
    with np.errstate(all="raise"):
        found = comm.multi_node_mean(sent)
        assert comm.multi_node_mean(sent, room) is room
        assert comm.multi_node_mean(sent, sent) is sent  # over what is sent
    for each in found, room, sent:
        assert each.dtype == expected.dtype
        rounded = ml_dtypes.finfo(each.real.dtype).eps
        np.testing.assert_allclose(each, expected, rtol=float(rounded))


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
