"""Messages beyond what a C int can count: run by `make test-full`."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from numpy.testing import assert_array_equal

pytestmark = [pytest.mark.world, pytest.mark.full, pytest.mark.sizes(2)]

BEYOND = (1 << 31) + 12_345  # elements of one byte
SIZE = 3 << 30  # of an object


@pytest.fixture(autouse=True)
def _release():
    yield
    gc.collect()


def pattern(rank):
    """Bytes that tell ranks and places apart."""
    array = np.full(BEYOND, rank + 1, np.int8)
    array[:: 1 << 20] = np.arange(1 + BEYOND // (1 << 20)) % 100 + rank
    array[-1] = -rank - 1
    return array


def check(array, expected):
    """Assert equality without another array of that size."""
    step = 1 << 26
    for start in range(0, BEYOND, step):
        piece = slice(start, start + step)
        assert_array_equal(array[piece], expected[piece], strict=True)


def test_arrays(naive):
    me = naive.rank
    if me == 0:
        naive.send(pattern(0), 1, 0)
    else:
        check(naive.recv(0, 0), pattern(0))
    check(naive.bcast(pattern(me), root=1), pattern(1))
    check(naive.scatter([pattern(3), pattern(4)]), pattern(3 + me))


@pytest.mark.parametrize("method", ["gather", "allgather", "alltoall"])
def test_arrays_of_all_ranks(naive, method):
    mine = pattern(naive.rank)
    argument = mine
    if method == "alltoall":
        argument = [mine, mine]
    found = getattr(naive, method)(argument)
    for rank, array in enumerate(found or ()):
        check(array, pattern(rank))


def test_allreduce(comm):
    expected = pattern(0)
    expected += pattern(1)
    check(comm.allreduce(pattern(comm.rank)), expected)


def check_object(found, rank):
    assert found["rank"] == rank
    assert found["array"].nbytes == SIZE
    assert (found["array"] == 7.5).all()


def test_objects_of_3_gib(naive):
    mine = {"array": np.full(SIZE // 8, 7.5), "rank": naive.rank}
    if naive.rank == 0:
        naive.send_obj(mine, 1, 0)
    else:
        check_object(naive.recv_obj(0, 0), 0)
    check_object(naive.bcast_obj(mine), 0)
    for rank, found in enumerate(naive.gather_obj(mine) or ()):
        check_object(found, rank)
    assert len(naive.bcast_obj(bytes(SIZE))) == SIZE  # in band
