"""Each operation of a communicator, on data of which every rank knows the result."""

from __future__ import annotations

from typing import Any

import numpy as np

same = np.testing.assert_array_equal


def rows(comm: Any, n: int) -> list[Any]:
    """An array of each rank."""
    return [np.arange(n, dtype="f4") + rank for rank in range(comm.size)]


def allreduce(comm: Any, n: int, root: int) -> None:
    same(comm.allreduce(rows(comm, n)[comm.rank]), sum(rows(comm, n)))


def bcast(comm: Any, n: int, root: int) -> None:
    mine = rows(comm, n)[root] if comm.rank == root else None
    same(comm.bcast(mine, root=root), rows(comm, n)[root])


def allgather(comm: Any, n: int, root: int) -> None:
    same(comm.allgather(rows(comm, n)[comm.rank]), rows(comm, n))


def gather(comm: Any, n: int, root: int) -> None:
    found = comm.gather(rows(comm, n)[comm.rank], root=root)
    if comm.rank == root:
        same(found, rows(comm, n))
    else:
        assert found is None


def scatter(comm: Any, n: int, root: int) -> None:
    given = rows(comm, n) if comm.rank == root else None
    same(comm.scatter(given, root=root), rows(comm, n)[comm.rank])


def alltoall(comm: Any, n: int, root: int) -> None:
    mine = rows(comm, n)[comm.rank]
    found = comm.alltoall([mine + 10 * other for other in range(comm.size)])
    same(found, [row + 10 * comm.rank for row in rows(comm, n)])


def objects(comm: Any, n: int, root: int) -> None:
    assert comm.allgather_obj((comm.rank, "x" * n)) == [
        (r, "x" * n) for r in range(comm.size)
    ]
    assert comm.bcast_obj(comm.rank, root=root) == root


def ring(comm: Any, n: int, root: int) -> None:
    """Each to the next; the last one receives first, so that no send waits for ever."""
    mine, after, before = (
        rows(comm, n)[comm.rank],
        *((comm.rank + d) % comm.size for d in (1, -1)),
    )
    if comm.rank < comm.size - 1:
        comm.send(mine, after)
    got = comm.recv(before)
    if comm.rank == comm.size - 1:
        comm.send(mine, after)
    same(got, rows(comm, n)[before])


OPERATIONS = (allreduce, bcast, allgather, gather, scatter, alltoall, objects, ring)
