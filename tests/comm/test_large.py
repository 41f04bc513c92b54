"""Messages beyond what a C int can count: run by `make test-full`."""

from __future__ import annotations

import gc

import numpy as np
import pytest

pytestmark = [pytest.mark.world, pytest.mark.full, pytest.mark.sizes(2)]

BEYOND = (1 << 31) + 12_345  # elements of one byte


@pytest.fixture(autouse=True)
def _release():
    yield
    gc.collect()


def pattern(rank: int) -> np.ndarray:
    """Bytes that tell ranks and places apart."""
    array = np.full(BEYOND, rank + 1, np.int8)
    array[:: 1 << 20] = np.arange(-(-BEYOND // (1 << 20))) % 100 + rank
    array[-1] = -rank - 1
    return array


def check(array: np.ndarray, expected: np.ndarray) -> None:
    """Assert equality without another array of that size."""
    assert array.shape == expected.shape
    step = 1 << 26
    for start in range(0, array.size, step):
        piece = slice(start, start + step)
        assert np.array_equal(array[piece], expected[piece])


def test_arrays(naive):
    me = naive.rank
    if me == 0:
        naive.send(pattern(0), 1, 0)
    else:
        check(naive.recv(0, 0), pattern(0))
    check(naive.bcast(pattern(1) if me == 1 else None, root=1), pattern(1))
    check(naive.scatter([pattern(3), pattern(4)] if me == 0 else None), pattern(3 + me))


@pytest.mark.parametrize("method", ["gather", "allgather"])
def test_gather(naive, method):
    for rank, array in enumerate(getattr(naive, method)(pattern(naive.rank)) or ()):
        check(array, pattern(rank))


def test_alltoall(naive):
    found = naive.alltoall([pattern(2 * naive.rank), np.int8(naive.rank)])
    if naive.rank == 1:
        assert found == (0, 1)
    else:
        for rank in range(2):
            check(found[rank], pattern(2 * rank))


def test_allreduce(comm):
    total, expected = comm.allreduce(pattern(comm.rank)), pattern(0)
    expected += pattern(1)
    check(total, expected)


@pytest.mark.parametrize("method", ["send_obj", "bcast_obj", "gather_obj"])
def test_objects_of_3_gib(naive, method):
    size = 3 << 30
    mine = {"array": np.full(size // 8, 7.5), "bytes": b"x", "rank": naive.rank}
    if method == "send_obj":
        found = [naive.recv_obj(0, 0)] if naive.rank else naive.send_obj(mine, 1, 0)
    else:
        found = getattr(naive, method)(mine)
    for rank, obj in enumerate([found] if method == "bcast_obj" else found or ()):
        assert obj["rank"] == rank
        assert obj["array"].nbytes == size
        assert (obj["array"] == 7.5).all()


def test_an_object_of_3_gib_in_band(naive):
    found = naive.bcast_obj(bytes(3 << 30) if naive.rank == 0 else None)
    assert len(found) == 3 << 30
