"""A monitor's place in the tree of a job's machines, and the queries that go along it.

A monitor queries its neighbours alone, and each of them those behind it. What comes back is joined
on the way, so every link carries a query and a reply each way, however many monitors ask at the
same time. Behind a neighbour that doesn't reply its own neighbours are queried in its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from . import roster
from .diagnosis import Rank, ranks_from_reply
from .network import NO_REPLY, Peer, poll_heartbeat, serve
from .tree import most_steps, neighbours

# Time between two heartbeats, and without one after which those behind are queried directly, too.
HEARTBEAT_SECONDS, SUSPECT_SECONDS = 1.0, 4.0
# Of the time for a reply, for each step from one machine to the next.
STEP_SECONDS = 0.1
# For one that sends no heartbeats here to say that it is there, before it is queried.
ALIVE_SECONDS = 0.5
# For another monitor to say whether it finds a machine silent, too.
SILENT_SECONDS = 1.0
# Age up to which a reply is given again. Which rank failed first is decided by less.
FRESH_SECONDS = {"stacks": 2.0, "calls": 1.0, "failed": 0.0}
# Of different stacks in a reply, so that it stays small; equal ones are sent once.
MOST_STACKS_CHARACTERS = 1 << 20

# "machines": what they say, by their numbers; "texts": the stacks whose keys they give;
# "finished": numbers of machines whose monitors are gone since their ranks have ended.
Reply = dict[str, dict[str, Any]]
# What a machine says to "alive", "failed", "calls" or "stacks".
Local = Callable[[str], dict[str, Any]]


@dataclass
class _Flight:
    """The last query of one kind to one side of the tree."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    started: float = -math.inf
    reply: Reply = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """What all other machines have replied."""

    ranks: list[Rank]  # to "calls" and "stacks"
    failed: list[float]  # to "failed": for how long a rank of a machine has been gone
    silent: list[str]  # names of the machines that gave no reply
    has_finished: bool  # whether one of these had ended


class MonitorTree:
    """This monitor among those of the job's machines; alone where the job has one machine."""

    def __init__(self, config: dict[str, Any] | None, silence: float, local: Local) -> None:
        """Take the place that `rendezvous` describes.

        A neighbour is silent after ``silence`` seconds without a heartbeat. ``local`` says what
        this machine replies; it is called in threads.
        """
        self._local, self._silence = local, silence
        self._number, self._secret, self._records = 0, "", b""
        if config is not None:
            self._number, self._secret = config["number"], config["secret"]
            self._records = bytes.fromhex(config["roster"])
        self._size = max(1, len(self._records) // roster.RECORD_BYTES)
        self._peers: dict[int, Peer] = {}
        self._flights: dict[tuple[str, int, int], _Flight] = {}
        self._lock = threading.Lock()
        self.neighbours = {one: self._peer(one) for one in neighbours(self._number, self._size)}

    def serve(self, listeners: Iterable[socket.socket]) -> None:
        """Begin to reply to other monitors."""
        for listener in listeners:
            served = listener, self._secret_of(self._number), self.reply
            threading.Thread(target=serve, args=served, daemon=True).start()

    def poll(self) -> None:
        """Begin to poll the neighbours; both ends of a link do, so either notices a cut."""
        for peer in self.neighbours.values():
            polled = peer, HEARTBEAT_SECONDS
            threading.Thread(target=poll_heartbeat, args=polled, daemon=True).start()

    def reply(self, query: str) -> dict[str, Any]:
        """Reply to another monitor; ValueError or LookupError for what isn't known."""
        kind, *numbers = query.split()
        if kind == "alive":
            return self._local(kind)
        if kind == "silent":
            return {"silent": self._finds_silent(int(numbers[0]))}
        if kind not in FRESH_SECONDS:
            raise ValueError(f"no query is called {kind}")
        beyond, seconds = int(numbers[0]), float(numbers[1]) - STEP_SECONDS
        # If it is its own number, this machine is asked for itself alone.
        others = [one for one in self.neighbours if beyond not in (one, self._number)]
        sides = self._sides(others, self._number, kind, seconds)
        return _with_ages(_joined([self._own(kind), *sides()]))

    def query(self, kind: str, seconds: float) -> Callable[[], Answers]:
        """Query all machines; return a function that waits for what they reply.

        A reply that takes longer, or can't be read, is none. For each step to the farthest machine
        there is some more time.
        """
        seconds += STEP_SECONDS * most_steps(self._size)
        replies = self._sides(self.neighbours, self._number, kind, seconds)
        return lambda: self._read(kind, _with_ages(_joined(replies())))

    def is_first_to_find_silent(self, number: int) -> bool:
        """Return whether it is for this monitor to report a silent neighbour.

        Its neighbours notice it at about the same time. The first of them that can be reached
        from here reports it, so that it is said once on each side of a cut.
        """
        found = []

        def ask(peer: Peer) -> None:
            with contextlib.suppress(*NO_REPLY):
                found.append(peer.query(f"silent {number}", SILENT_SECONDS)["silent"])

        around = neighbours(number, self._size)
        before = takewhile(lambda other: other != self._number, around)
        _run_all(ask, [(self._peer(other),) for other in before], SILENT_SECONDS)()
        return not any(found)

    def _own(self, kind: str) -> Reply:
        said, texts = self._local(kind), {}
        for rank in said.get("ranks", ()):
            if text := rank["stacks"]:
                key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
                rank["stacks"], texts[key] = key, text
        return _with_ages({"machines": {str(self._number): said}, "texts": texts})

    def _peer(self, number: int) -> Peer:
        with self._lock:
            if number not in self._peers:
                machine = roster.unpack(self._records, number)
                self._peers[number] = Peer(machine, self._secret_of(number))
            return self._peers[number]

    def _secret_of(self, number: int) -> str:
        """Return a machine's own secret: another one may listen on the same address."""
        return f"{self._secret} {number}"

    def _finds_silent(self, number: int) -> bool:
        """Return whether a neighbour is silent, or about to be."""
        peer = self.neighbours.get(number)
        if peer is None or peer.last_heartbeat is None:
            return False
        return time.monotonic() - peer.last_heartbeat > self._silence / 2

    def _sides(
        self, numbers: Iterable[int], beyond: int, kind: str, seconds: float
    ) -> Callable[[], list[Reply]]:
        """Query these machines at once, each with those behind it, seen from ``beyond``.

        Return a function that waits for the replies.
        """
        deadline = time.monotonic() + seconds
        replies: list[Reply] = []

        def query(number: int) -> None:
            replies.append(self._side(number, beyond, kind, deadline))

        wait = _run_all(query, [(number,) for number in numbers], seconds)

        def result() -> list[Reply]:
            wait()
            return list(replies)

        return result

    def _side(self, number: int, beyond: int, kind: str, deadline: float) -> Reply:
        """Return what a machine and those behind it reply; those are queried once for all."""
        came = time.monotonic()
        with self._lock:
            flight = self._flights.setdefault((kind, number, beyond), _Flight())
        if not flight.lock.acquire(timeout=max(0.0, deadline - came)):
            return {}
        try:
            if flight.started < came - FRESH_SECONDS[kind]:
                flight.started = time.monotonic()
                flight.reply = self._ask(number, beyond, kind, deadline)
            return flight.reply
        finally:
            flight.lock.release()

    def _ask(self, number: int, beyond: int, kind: str, deadline: float) -> Reply:
        peer, now = self._peer(number), time.monotonic()
        if number in self.neighbours:
            last = self.neighbours[number].last_heartbeat
            is_suspect = last is not None and now - last > SUSPECT_SECONDS
        else:  # it may be lost with the one that is passed over
            is_suspect = not _is_alive(peer, min(ALIVE_SECONDS, deadline - now))
            now = time.monotonic()
        # Those behind it are seen from it, although it is passed over.
        behind = [one for one in neighbours(number, self._size) if one != beyond]
        found: list[Reply] = []
        sides: Callable[[], list[Reply]] = list
        seconds = deadline - now
        if is_suspect:  # it may be gone, or late: it and those behind it at the same time
            sides = self._sides(behind, number, kind, seconds - STEP_SECONDS)
            seconds /= 2  # others, which have come since and have less time, wait for this, too
        query = f"{kind} {number if is_suspect else beyond} {seconds:.3f}"
        try:
            found.append(_with_ages(_joined([peer.query(query, seconds)])))
        except NO_REPLY:
            if peer.has_finished:
                found.append({"finished": {str(number): True}})
            if not is_suspect:
                sides = self._sides(behind, number, kind, deadline - time.monotonic())
        return _joined([*found, *sides()])

    def _read(self, kind: str, reply: Reply) -> Answers:
        ranks: list[Rank] = []
        failed: list[float] = []
        silent = {*range(self._size)} - {self._number}
        for number in sorted(silent):
            with contextlib.suppress(*NO_REPLY):
                said = reply["machines"][str(number)]
                if kind == "failed":
                    failed.append(float(said["failed"] or 0))
                else:
                    texts, parsed = reply["texts"], ranks_from_reply(said)
                    ranks += (replace(it, stacks=texts.get(it.stacks, "")) for it in parsed)
                silent.remove(number)
        names = sorted(self._peer(number).name for number in silent)
        return Answers(ranks, failed, names, bool(reply["finished"]))


def _is_alive(peer: Peer, seconds: float) -> bool:
    with contextlib.suppress(*NO_REPLY):
        peer.query("alive", seconds)
        return True
    return False


def _joined(replies: Iterable[Reply]) -> Reply:
    """Return all of these in one; what one of them can't be read as is raised."""
    joined: Reply = {"machines": {}, "texts": {}, "finished": {}}
    for reply in replies:
        for name, found in joined.items():
            found.update(reply.get(name, {}))
    texts, characters = joined["texts"], 0
    for key in list(texts):
        characters += len(texts[key])
        if characters > MOST_STACKS_CHARACTERS:
            del texts[key]
    return joined


def _with_ages(reply: Reply) -> Reply:
    """Return a reply with times of failures in place of their ages, or the other way round.

    Ages travel, as machines have clocks of their own; here times stay right while others reply.
    """
    now, machines = time.monotonic(), {}
    for number, said in reply["machines"].items():
        machines[number] = said
        if isinstance(said, dict) and isinstance(said.get("failed"), int | float):
            machines[number] = {**said, "failed": now - said["failed"]}
    return {**reply, "machines": machines}


def _run_all(
    function: Callable[..., None], arguments: Iterable[tuple[Any, ...]], seconds: float
) -> Callable[[], None]:
    """Call a function with each of these at once, in threads; return one that waits for all."""
    deadline = time.monotonic() + seconds
    threads = [threading.Thread(target=function, args=each, daemon=True) for each in arguments]
    for thread in threads:
        thread.start()

    def wait() -> None:
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    return wait
