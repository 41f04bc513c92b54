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


def test_send_and_recv(naive):
    if naive.rank == 0:
        naive.send(pattern(0), 1, 0)
    else:
        check(naive.recv(0, 0), pattern(0))


def test_bcast(naive):
    found = naive.bcast(pattern(1) if naive.rank == 1 else None, root=1)
    check(found, pattern(1))


@pytest.mark.parametrize("verb", ["gather", "allgather"])
def test_gather(naive, verb):
    found = getattr(naive, verb)(pattern(naive.rank))
    for rank, array in enumerate(found or ()):
        check(array, pattern(rank))


def test_scatter(naive):
    xs = [pattern(3), pattern(4)] if naive.rank == 0 else None
    check(naive.scatter(xs), pattern(3 + naive.rank))


def test_alltoall(naive):
    found = naive.alltoall([pattern(2 * naive.rank), np.int8(naive.rank)])
    if naive.rank == 0:
        check(found[0], pattern(0))
        check(found[1], pattern(2))
    else:
        assert found == (0, 1)


def test_allreduce(comm):
    total = comm.allreduce(pattern(comm.rank))
    expected = pattern(0)
    expected += pattern(1)
    check(total, expected)


@pytest.mark.parametrize("verb", ["send", "bcast", "gather"])
def test_objects_of_3_gib(naive, verb):
    size = 3 << 30
    mine = {"array": np.full(size // 8, 7.5), "bytes": b"x", "rank": naive.rank}
    if verb == "send":
        found = None
        if naive.rank == 0:
            naive.send_obj(mine, 1, 0)
        else:
            found = [naive.recv_obj(0, 0)]
    elif verb == "bcast":
        found = [naive.bcast_obj(mine)]
    else:
        found = getattr(naive, f"{verb}_obj")(mine)
    for rank, obj in enumerate(found or ()):
        assert obj["rank"] == rank
        assert obj["array"].nbytes == size
        assert (obj["array"] == 7.5).all()


def test_an_object_of_3_gib_in_band(naive):
    found = naive.bcast_obj(bytes(3 << 30) if naive.rank == 0 else None)
    assert len(found) == 3 << 30
