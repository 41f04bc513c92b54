"""What a rank sends and receives by messages of MPI, counted where they are given to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from chainermn_comm.sums import circulant, pairwise


@dataclass
class Messages:
    """Messages of one rank, and bytes."""

    messages: int = 0
    sent: int = 0
    received: int = 0


class _Counting:
    """A communicator that counts."""

    def __init__(self, comm: Any, counts: Messages) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._counts = comm, counts

    def Isend(self, buffer: Any, dest: int, tag: int) -> Any:
        self._counts.messages += 1
        self._counts.sent += buffer[0].nbytes
        return self._comm.Isend(buffer, dest, tag)

    def Irecv(self, buffer: Any, source: int, tag: int) -> Any:
        self._counts.received += buffer[0].nbytes
        return self._comm.Irecv(buffer, source, tag)


@contextlib.contextmanager
def counted_messages() -> Iterator[Messages]:
    """Meanwhile, what this rank exchanges for sums over ranks."""
    counts = Messages()

    def counting(module: Any) -> Any:
        start = module.start_exchange

        def start_exchange(comm: Any, *rest: Any) -> Any:
            return start(_Counting(comm, counts), *rest)

        return mock.patch.object(module, "start_exchange", start_exchange)

    with counting(circulant), counting(pairwise):
        yield counts
