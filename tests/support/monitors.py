"""Monitors of many machines, as threads of this process, and what they send one another."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from chainermn_comm.watchdog import roster
from chainermn_comm.watchdog.diagnosis import Rank
from chainermn_comm.watchdog.monitor_tree import Answers, MonitorTree
from chainermn_comm.watchdog.processes import RUNNING
from chainermn_comm.watchdog.roster import Machine
from chainermn_comm.watchdog.tree import FANOUT, most_steps, neighbours

__all__ = ["FANOUT", "Answers", "Machine", "most_steps", "neighbours"]

SECRET = "x"
# After so long a neighbour counts as silent.
SILENCE = 20.0
# For a monitor that says nothing; longer than any query.
HANG_SECONDS = 60.0


def machine(host: str, ranks: Sequence[int], listeners: Sequence[socket.socket] = ()) -> Machine:
    """A machine as other monitors know it."""
    endpoints = tuple(listener.getsockname()[:2] for listener in listeners)
    return Machine(host, len(ranks), tuple(ranks), endpoints)


def place(number: int, machines: Sequence[Machine]) -> dict[str, Any]:
    """What a monitor is told of the tree."""
    records = b"".join(
        roster.pack(one.host, list(one.ranks), list(one.endpoints)) for one in machines
    )
    return {
        "number": number,
        "roster": records.hex(),
        "secret": SECRET,
    }


def machines_of(tree: dict[str, Any]) -> list[Machine]:
    """The machines that a monitor is told of."""
    records = bytes.fromhex(tree["roster"])
    return [roster.unpack(records, n) for n in range(len(records) // roster.RECORD_BYTES)]


class Monitors:
    """The trees of monitors, one of each machine, each with some ranks."""

    def __init__(self, size: int, ranks: int = 2) -> None:
        """Make so many, with so many ranks each; they reply once they are started."""
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
        self.ranks = ranks
        # By machine and kind: how often one was asked for what it says itself.
        self.asked: Counter[tuple[int, str]] = Counter()
        # By the two machines: queries from the first to the second.
        self.queries: Counter[tuple[int, int]] = Counter()
        # What a machine says to all queries, or its monitor replies, in place of what is right.
        self.says: dict[int, Any] = {}
        self.replies: dict[int, Any] = {}
        self._hanging: set[int] = set()
        self._ended = threading.Event()
        # What each machine says of failures and stacks.
        self.failed: dict[int, float] = {}
        self.stacks = 'Thread (most recent call first):\n  File "/x.py", line 1 in f'
        self.machines = [
            machine(f"host{number}", self.ranks_of(number), [listener])
            for number, listener in enumerate(self.listeners)
        ]
        self.trees = [self._tree(number) for number in range(size)]

    def ranks_of(self, number: int) -> list[int]:
        return [number * self.ranks + place for place in range(self.ranks)]

    def start(self) -> None:
        """Have all reply; nobody polls heartbeats."""
        for number, tree in enumerate(self.trees):
            tree.reply = partial(self._reply, number, tree.reply)  # type: ignore[method-assign]
            tree.serve([self.listeners[number]])

    def let_go(self, number: int) -> None:
        """End a monitor: connections to it are refused from now on."""
        listener = self.listeners[number]
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()

    def mislead(self, number: int, other: int, to: int) -> None:
        """Have a monitor connect to a third one where it wants another."""
        self.trees[number].neighbours[other]._endpoints = list(self.machines[to].endpoints)

    def hang(self, number: int) -> None:
        """Have a monitor accept connections and say nothing."""
        self._hanging.add(number)

    def heard(self, number: int, seconds_ago: float) -> None:
        """Have a machine's neighbours believe that it was heard then."""
        then = time.monotonic() - seconds_ago
        for one in neighbours(number, len(self.trees)):
            self.trees[one].neighbours[number].last_heartbeat = then

    def close(self) -> None:
        self._ended.set()
        for number, listener in enumerate(self.listeners):
            if listener.fileno() >= 0:
                with contextlib.suppress(OSError):
                    self.let_go(number)

    def _tree(self, number: int) -> MonitorTree:
        made = MonitorTree(
            place(number, self.machines), SILENCE, lambda kind: self._says(number, kind)
        )
        for other, peer in made.neighbours.items():
            self._count(number, other, peer)
        find = made._peer

        def find_counted(other: int) -> Any:
            peer = find(other)
            if "query" not in vars(peer):
                self._count(number, other, peer)
            return peer

        made._peer = find_counted  # type: ignore[method-assign]
        return made

    def _count(self, number: int, other: int, peer: Any) -> None:
        query = peer.query

        def counted(*args: Any) -> Any:
            self.queries[number, other] += 1
            return query(*args)

        peer.query = counted

    def _reply(self, number: int, reply: Callable[[str], Any], query: str) -> Any:
        if number in self._hanging:
            self._ended.wait(HANG_SECONDS)
        return self.replies[number] if number in self.replies else reply(query)

    def _says(self, number: int, kind: str) -> dict[str, Any]:
        self.asked[number, kind] += 1
        if number in self.says:
            return self.says[number]
        if kind == "alive":
            return {"finished": False}
        if kind == "failed":
            return {"failed": self.failed.get(number)}
        stacks = self.stacks if kind == "stacks" else ""
        host = f"host{number}"
        those = (
            Rank(one, host, os.getpid(), RUNNING, stacks=stacks) for one in self.ranks_of(number)
        )
        return {"ranks": list(map(asdict, those))}


@contextlib.contextmanager
def monitors(size: int, ranks: int = 2) -> Iterator[Monitors]:
    """Monitors that have been started, and end with the block."""
    made = Monitors(size, ranks)
    try:
        made.start()
        yield made
    finally:
        made.close()
