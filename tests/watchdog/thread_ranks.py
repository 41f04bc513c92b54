"""Ranks as threads of this process, over a double of mpi4py that counts what each receives.

One rank runs at a time, until it waits for another: hundreds that contend for the
interpreter can stand still for a minute, as the C library loses wake-ups (glibc's bug
25847, mended in 2.41).

Collective operations count as MPI's usual algorithms move data: an all-gather gives
each rank all blocks, a broadcast or reduction takes a tree, a gather gives the root
everything.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

# Of a split, as MPI gathers them: color and key.
SPLIT_BYTES = 8
OURS = "/chainermn_comm/"


class _Turns:
    """Which rank runs; the first of those that are left."""

    def __init__(self, size: int) -> None:
        self._left = deque(range(size))
        self._locks = [threading.Lock() for _ in range(size)]
        self._waits = 0  # in a row, none of which found what it waited for
        self.errors: list[BaseException] = []
        for lock in self._locks[1:]:
            lock.acquire()

    def begin(self, rank: int) -> None:
        self._locks[rank].acquire()

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Let the others run until this is so.

        Raises:
            RuntimeError: another rank failed, or all wait for one another.
        """
        rank = self._left[0]
        while not is_so():
            self._waits += 1
            if self.errors or self._waits > 2 * len(self._left):
                raise RuntimeError(f"rank {rank} waits in vain")
            self._left.rotate(-1)
            self._locks[self._left[0]].release()
            self._locks[rank].acquire()
        self._waits = 0

    def end(self) -> None:
        self._left.popleft()
        self._waits = 0
        if self._left:
            self._locks[self._left[0]].release()


class _Group:
    """What the ranks of one communicator share."""

    def __init__(self, world: list[int], turns: _Turns, counts: Counts) -> None:
        self.world, self.turns, self.counts = world, turns, counts
        self.exchanges: dict[int, dict[int, Any]] = defaultdict(dict)
        self.messages: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)


class Counts:
    """By rank: bytes received, ranks from which messages came, and lines of ours that ran."""

    def __init__(self) -> None:
        self.received: Counter[int] = Counter()
        self.senders: dict[int, set[int]] = defaultdict(set)
        self.lines: Counter[int] = Counter()


class CountedComm:
    """A communicator's double, for one of its ranks."""

    def __init__(self, group: _Group, rank: int, ranks_per_node: int) -> None:
        self._group, self._ranks_per_node = group, ranks_per_node
        self.rank, self.size = rank, len(group.world)
        self._calls = 0

    def _count(self, nbytes: int) -> None:
        self._group.counts.received[self._group.world[self.rank]] += nbytes

    def _exchanged(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values = self._group.exchanges[self._calls]
        self._calls += 1
        values[self.rank] = value
        self._group.turns.wait_until(lambda: len(values) == self.size)
        return [values[rank] for rank in range(self.size)]

    def Split(self, color: int = 0, key: int = 0) -> Any:
        self._count(SPLIT_BYTES * self.size)
        everyone = self._exchanged((color, key))
        mine = [
            rank
            for (_, _, rank) in sorted(
                (c, k, r) for r, (c, k) in enumerate(everyone) if c == color
            )
        ]
        group = None
        if color != MPI.UNDEFINED and mine[0] == self.rank:
            world = [self._group.world[rank] for rank in mine]
            group = _Group(world, self._group.turns, self._group.counts)
        groups = self._exchanged(group)
        if color == MPI.UNDEFINED:
            return MPI.COMM_NULL
        return CountedComm(groups[mine[0]], mine.index(self.rank), self._ranks_per_node)

    def Split_type(self, _: int) -> CountedComm:
        node: CountedComm = self.Split(
            self._group.world[self.rank] // self._ranks_per_node
        )
        return node

    def Free(self) -> None:
        pass

    def allgather(self, obj: Any) -> list[Any]:
        found = self._exchanged(pickle.dumps(obj))
        self._count(sum(map(len, found)))
        return list(map(pickle.loads, found))

    def gather(self, obj: Any) -> list[Any] | None:
        found = self._exchanged(pickle.dumps(obj))
        if self.rank:
            return None
        self._count(sum(map(len, found)))
        return list(map(pickle.loads, found))

    def bcast(self, obj: Any) -> Any:
        found = self._exchanged(pickle.dumps(obj))[0]
        self._count(len(found))
        return pickle.loads(found)

    def reduce(self, obj: Any, op: Callable[[Any, Any], Any]) -> Any:
        step = 1
        while step < self.size:
            if self.rank & step:
                self.isend(obj, self.rank - step)
                return None
            if self.rank + step < self.size:
                obj = op(obj, self.recv(self.rank + step))
            step *= 2
        return obj

    def Bcast(self, array: Any) -> None:
        self._count(array.nbytes)
        array[...] = self._exchanged(array.copy())[0]

    def Allreduce(self, _: Any, array: Any, op: Any) -> None:
        assert op == MPI.MAX
        own = np.asarray(array)
        self._count(own.nbytes)
        own[...] = np.max(self._exchanged(own.copy()), axis=0)

    def Allgather(self, sent: Any, received: Any) -> None:
        mine, target = (memoryview(_buffer(one)).cast("B") for one in (sent, received))
        found = self._exchanged(bytes(mine))
        self._count(sum(map(len, found)))
        target[:] = b"".join(found)

    def isend(self, obj: Any, dest: int) -> CountedComm:
        self._group.messages[self.rank, dest].append(pickle.dumps(obj))
        return self

    def Barrier(self) -> None:
        self._exchanged(None)

    def wait(self) -> None:
        """The message is on its way."""

    def recv(self, source: int) -> Any:
        messages = self._group.messages[source, self.rank]
        self._group.turns.wait_until(lambda: bool(messages))
        found = messages.popleft()
        self._count(len(found))
        world = self._group.world
        self._group.counts.senders[world[self.rank]].add(world[source])
        return pickle.loads(found)


def _buffer(argument: Any) -> Any:
    return argument[0] if isinstance(argument, list) else argument


def run(
    size: int, ranks_per_node: int, what: Callable[[CountedComm], Any]
) -> tuple[list[Any], Counts]:
    """Call a function on so many ranks, ``ranks_per_node`` of them on each node.

    Returns what it returned on each, and what was counted.
    """
    counts, turns = Counts(), _Turns(size)
    group = _Group(list(range(size)), turns, counts)
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        def trace(frame: FrameType, event: str, _: object) -> Any:
            if OURS not in frame.f_code.co_filename:
                return None
            if event == "line":
                counts.lines[rank] += 1
            return trace

        turns.begin(rank)
        sys.settrace(trace)
        try:
            found[rank] = what(CountedComm(group, rank, ranks_per_node))
        except BaseException as error:
            turns.errors.append(error)
        finally:
            sys.settrace(None)
            turns.end()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.errors:
        raise turns.errors[0]
    return [found[rank] for rank in range(size)], counts
