"""Sums that are under way: generators of rounds of messages, of which several go on at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

from ..runtime import wait_all

# The steps of one sum. Each step starts messages, and yields the requests that must be
# done before the next step.
Rounds: TypeAlias = Iterator[list[MPI.Request]]


class RunningSum:
    """A sum whose first messages are under way."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._requests = next(rounds, None)

    @property
    def is_over(self) -> bool:
        """Whether the sum has been taken."""
        return self._requests is None

    def advance(self) -> None:
        """Wait for the messages of this round, and start those of the next."""
        if self._requests is not None:
            wait_all(self._requests)
            self._requests = next(self._rounds, None)


def run(sums: Iterable[Rounds], at_once: int) -> None:
    """Take ``at_once`` sums at a time, one round of each in turn (collective).

    All ranks send and receive in the same order, which follows from the sums alone. So
    messages of different sums may have the same tag.
    """
    todo = iter(sums)
    under_way = deque(map(RunningSum, islice(todo, at_once)))
    while under_way:
        oldest = under_way.popleft()
        oldest.advance()
        if not oldest.is_over:
            under_way.append(oldest)
        else:
            under_way.extend(map(RunningSum, islice(todo, 1)))


class ReceiveMemory:
    """Memory for received messages, which sums use one after another."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []

    @contextmanager
    def borrowed(self, nbytes: int) -> Iterator[np.ndarray]:
        """Lend bytes, and after an error not the same ones again, since MPI may write to them."""
        memory = None
        if self._free:
            memory = self._free.pop()
        if memory is None or memory.nbytes < nbytes:
            memory = np.empty(nbytes, np.uint8)
        yield memory[:nbytes]
        self._free.append(memory)
