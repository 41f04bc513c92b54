"""Monitors of many machines in this process, links between two, and ranks that tests drive."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from selectors import DefaultSelector
from typing import Any
from unittest import mock

from chainermn_comm.watchdog.diagnosis import Rank
from chainermn_comm.watchdog.monitor import first_machine, judge, local_ranks
from chainermn_comm.watchdog.monitor import monitor as module
from chainermn_comm.watchdog.monitor.first_machine import FirstMachine
from chainermn_comm.watchdog.monitor.monitor import Monitor
from chainermn_comm.watchdog.monitor.other_machines import OtherMachines
from chainermn_comm.watchdog.processes import RUNNING
from chainermn_comm.watchdog.status_region import COLLECTIVE, IDLE, NOBODY, Call
from chainermn_comm.watchdog.timeout import Timeout

CUT = OSError(errno.ETIMEDOUT, "the link is cut")
ENDED = EOFError("the other monitor has ended")


def made_monitor() -> Monitor:
    """A monitor to which no rank can come."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("")
    listener.listen()
    return Monitor(listener)


def limited(monitor: Monitor, *timeout):
    """Give it a time-out: its fields."""
    monitor.local.timeout = Timeout(*timeout)


def address_of(monitor: Monitor):
    """Where ranks, and who asks, connect to it."""
    return monitor.local._listener.getsockname()


def seen_as_user(user: int) -> contextlib.AbstractContextManager[object]:
    """Meanwhile who connects to a monitor is this user's."""
    peer = module.processes.Peer(1, user)
    return mock.patch.object(module.processes, "peer_of", return_value=peer)


def close_monitor(monitor: Monitor):
    for key in list(monitor.selector.get_map().values()):
        monitor.selector.unregister(key.fileobj)
        key.fileobj.close()  # type: ignore[union-attr]
    monitor.selector.close()


class SimulatedRank:
    """A rank of a simulated machine, which waits in a collective call or doesn't."""

    def __init__(self, world: int, size: int):
        self.world = world
        self.size = size
        self.pid = os.getpid()
        self.launcher = self.pid
        # The last collective call, since when it waits there or not, and whether it
        # does.
        self.call = 1
        self.since = time.monotonic()
        self.waits = False
        self.failed_at = math.inf
        self.has_aborted = False

    def enter(self):
        self.call += 1
        self.since = time.monotonic()
        self.waits = True

    def read(self, now: float, awake_since: float = 0.0, stacks: str = "") -> Rank:
        state = IDLE
        if self.waits:
            state = COLLECTIVE
        call = Call(
            communicator=1,
            rank=self.world,
            size=self.size,
            state=state,
            age=now - self.since,
            sequence=self.call,
            nbytes=0,
            peer=NOBODY,
            tag=NOBODY,
            operation="allreduce",
        )
        return Rank(
            self.world,
            f"host{self.world}",
            self.pid,
            RUNNING,
            (call,),
            failed_at=self.failed_at,
            has_aborted=self.has_aborted,
        )


class Simulation:
    """So many machines, each with one rank and its monitor; threads let them look."""

    def __init__(self, size: int, timeout: Timeout):
        # What the monitors of which machines print, and those that end their ranks.
        self.printed: list[tuple[int, str]] = []
        self.ended: set[int] = set()
        self.failures: list[BaseException] = []
        self._over = threading.Event()
        self.ranks = [SimulatedRank(number, size) for number in range(size)]
        self.monitors = [self._monitor(number, timeout) for number in range(size)]
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.description = {"name": "host0", "question": "who?", "answer": "me"}
        first, *others = self.monitors
        port = os.dup(self.listener.fileno())
        first.handle_local({"kind": "first machine", **self.description}, [port])
        for other in others:
            endpoints = [self.listener.getsockname()]
            description = {**self.description, "endpoints": endpoints}
            other.handle_local({"kind": "other machine", **description}, [])
        self._threads = [
            threading.Thread(target=self._drive, args=(monitors,), daemon=True)
            for monitors in (
                self.monitors[:1],
                *(self.monitors[n::8] for n in range(1, 9)),
            )
        ]

    def _monitor(self, number: int, timeout: Timeout) -> Monitor:
        made = made_monitor()
        made.local.ranks.append(self.ranks[number])  # type: ignore[arg-type]
        made.local.timeout = timeout
        printed = lambda text, *_: self.printed.append((number, text))  # noqa: E731
        made.print = printed  # type: ignore[method-assign]
        return made

    def _drive(self, monitors: list[Monitor]):
        try:
            while not self._over.wait(0.05):
                for one in list(monitors):
                    if not one.look():
                        self.ended.add(one.local.ranks[0].world)
                        monitors.remove(one)
        except BaseException as error:
            self.failures.append(error)
            raise

    def start(self):
        for thread in self._threads:
            thread.start()

    @property
    def num_linked(self) -> int:
        """How many machines are connected, and have pushed their ranks."""
        first, *others = self.monitors
        linked = [
            one for one in others if one.first_machine and one.first_machine.is_linked
        ]
        return min(len(first.other_machines.known), len(linked))

    def cut(self, number: int, error: Exception = CUT):
        """Cut the link to a machine, as both kernels see it at last; it stays so."""
        for machine in self.monitors[0].other_machines.known:
            if machine.ranks[0].world == number:
                machine.link.close(error)

    def until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (
            not (done := is_done())
            and time.monotonic() < deadline
            and not self.failures
        ):
            time.sleep(0.05)
        assert not self.failures, self.failures
        return done

    def close(self):
        self._over.set()
        for thread in self._threads:
            thread.join(20.0)  # one that hangs is a daemon
        for made in self.monitors:
            close_monitor(made)
        self.listener.close()


@contextmanager
def simulation(size: int, **timeout):
    """Monitors that have been started, with this time-out, and end with the block."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with (
        mock.patch.object(module, "TICK_SECONDS", 0.0),
        mock.patch.object(local_ranks, "collect_stacks", return_value={}),
        mock.patch.object(module, "SharedFiles"),
        mock.patch.object(module.processes, "terminate"),
        mock.patch.multiple(module, FORWARDING_SECONDS=0.0, CUT_OFF_SECONDS=1.0),
        mock.patch.object(judge, "launchers_of", return_value=[]),
    ):
        made = Simulation(size, Timeout(**timeout))
        try:
            made.start()
            yield made
        finally:
            made.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


AGREED = {"name": "host0", "question": "who?", "answer": "me"}


class Links:
    """A first machine and another one, without monitors."""

    def __init__(self):
        self.selector = DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.others = OtherMachines(self.selector)
        self.others.listen(os.dup(self.listener.fileno()), AGREED, 20.0)
        self.heard: list[Any] = []
        self.first = self.connected(self.listener)

    def connected(self, *listeners: socket.socket) -> FirstMachine:
        """Another machine that tries to connect to these in turn."""
        endpoints = [each.getsockname() for each in listeners]
        where = AGREED | {"endpoints": endpoints}
        return FirstMachine(self.selector, where, 20.0, self.heard.append)

    def until(self, is_done: Callable[[], object], seconds: float = 10.0) -> bool:
        """Drive all until something holds; whether it did in time."""
        deadline = time.monotonic() + seconds
        while not (done := is_done()) and time.monotonic() < deadline:
            for key, _ in self.selector.select(0.01):
                key.data()
            self.first.connect_if_due(time.monotonic())
        return bool(done)

    def are_linked(self) -> bool:
        return self.first.is_linked and len(self.others.linked) == 1

    @contextmanager
    def stranger(self):
        """A connection of somebody else."""
        with socket.create_connection(self.listener.getsockname()) as made:
            yield made

    def close(self):
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.listener.close()


def impatient() -> contextlib.AbstractContextManager[object]:
    """Meanwhile another machine waits a moment for an answer, and before it tries again."""
    return mock.patch.object(first_machine, "RETRY_SECONDS", 0.1)
