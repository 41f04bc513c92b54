"""What a rank sends and receives by messages of MPI, counted where they are given to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from chainermn_comm.sums import circulant, pairwise


class Counting:
    """A communicator that counts messages and bytes."""

    def __init__(self, comm: Any, counts: dict[str, int]) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self._comm = comm
        self._counts = counts

    def Isend(self, buffer: Any, dest: int, tag: int) -> Any:
        self._counts["messages"] += 1
        self._counts["sent"] += buffer[0].nbytes
        return self._comm.Isend(buffer, dest, tag)

    def Irecv(self, buffer: Any, source: int, tag: int) -> Any:
        self._counts["received"] += buffer[0].nbytes
        return self._comm.Irecv(buffer, source, tag)


@contextlib.contextmanager
def counted_messages() -> Iterator[dict[str, int]]:
    """Meanwhile, what this rank exchanges for sums over ranks."""
    counts = {"messages": 0, "sent": 0, "received": 0}
    with contextlib.ExitStack() as stack:
        for module in (circulant, pairwise):
            start = module.start_exchange

            def start_exchange(comm: Any, *rest: Any, start: Any = start) -> Any:
                return start(Counting(comm, counts), *rest)

            patch = mock.patch.object(module, "start_exchange", start_exchange)
            stack.enter_context(patch)
        yield counts
