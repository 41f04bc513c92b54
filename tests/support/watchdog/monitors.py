"""Monitors of many machines in this process, with ranks that do what a test says."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from selectors import DefaultSelector
from types import SimpleNamespace
from typing import Any
from unittest import mock

from chainermn_comm.watchdog.diagnosis import Rank
from chainermn_comm.watchdog.monitor import monitor as module
from chainermn_comm.watchdog.monitor.monitor import Monitor
from chainermn_comm.watchdog.monitor.star import Star
from chainermn_comm.watchdog.processes import RUNNING
from chainermn_comm.watchdog.status_region import COLLECTIVE, HEADER, IDLE, NOBODY, Call

SECRET = "x"
SILENCE = 20.0
CUT = OSError(errno.ETIMEDOUT, "the link is cut")


def star_of(
    number: int, listener: socket.socket, names: Sequence[str]
) -> dict[str, Any]:
    """What a monitor is told of the star."""
    endpoints = [listener.getsockname()[:2]] if number else []
    known = list(names[:1] if number else names)
    return {"number": number, "names": known, "endpoints": endpoints, "secret": SECRET}


def link_of(star: Star) -> Any:
    """A spoke's connection to its hub, be it that nothing is proved yet."""
    (found,) = (*star.links.values(), *star._strangers)
    return found


def cut(spoke: Star) -> None:
    """Cut a spoke's link to its hub, as the kernel sees it at last."""
    (stranger,) = spoke._strangers
    spoke._link(stranger, 0)
    spoke._lose(stranger, CUT)


def close(spoke: Star) -> None:
    """Close what a spoke has open."""
    for one in (*spoke.links.values(), *spoke._strangers):
        # Its own thread has been faster.
        with contextlib.suppress(KeyError, ValueError):
            spoke._lose(one)


class Links:
    """A hub and spokes without monitors, driven by a thread of its own."""

    def __init__(self, size: int, silence: float = SILENCE) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.names = [f"rank {number} on host{number}" for number in range(size)]
        self.selector = DefaultSelector()
        self.heard: list[tuple[int, Any]] = []
        star = star_of(0, self.listener, self.names)
        take = lambda number, message: self.heard.append((number, message))  # noqa: E731
        self.hub = Star(self.selector, self.listener, star, silence, take)
        self.spokes = [
            Star(
                self.selector,
                None,
                star_of(n, self.listener, self.names),
                silence,
                self.answer(n),
            )
            for n in range(1, size)
        ]
        # What spokes reply to questions; None for nothing.
        self.says: dict[int, Any] = {}

    def answer(self, number: int) -> Callable[[int, Any], None]:
        def take(_: int, message: Any) -> None:
            said = self.says.get(number, {"ranks": [number]})
            if message["kind"] == "ask" and said is not None:
                self.spokes[number - 1].tell("reply", query=message["query"], **said)
            self.heard.append((-number, message))

        return take

    def poll(self, seconds: float) -> None:
        for key, _ in self.selector.select(seconds):
            key.data()

    def until(self, is_done: Callable[[], bool], seconds: float = 10.0) -> bool:
        """Drive all until something holds; whether it did in time."""
        deadline = time.monotonic() + seconds
        while not (done := is_done()) and time.monotonic() < deadline:
            self.poll(0.01)
            for one in (self.hub, *self.spokes):
                one.keep()
        return done

    def connect(self) -> None:
        assert self.until(lambda: all(spoke.links for spoke in self.spokes))

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.listener.close()
        self.selector.close()


@contextlib.contextmanager
def links(size: int, silence: float = SILENCE) -> Iterator[Links]:
    made = Links(size, silence)
    try:
        yield made
    finally:
        made.close()


class SimulatedRank:
    """A rank of a simulated machine, which waits in a collective call or doesn't."""

    def __init__(self, world: int, size: int, liveness: int) -> None:
        self.world, self.size, self.liveness = world, size, liveness
        self.pid = os.getpid()
        self.launchers = self.pid, self.pid
        self.process = (self.pid, module.processes.stat(self.pid).start)
        self.region = bytearray(HEADER.size)
        # The last collective call, since when it waits there or not, and whether it
        # does.
        self.call, self.since, self.waits = 1, time.monotonic(), False

    def state(self) -> str:
        return RUNNING

    def enter(self) -> None:
        self.call, self.since, self.waits = self.call + 1, time.monotonic(), True

    def read(self, now: float) -> Rank:
        doing = COLLECTIVE if self.waits else IDLE
        about = 0, NOBODY, NOBODY, "allreduce"
        call = Call(
            (0, 1), self.world, self.size, doing, now - self.since, self.call, *about
        )
        return Rank(self.world, f"host{self.world}", self.pid, RUNNING, (call,))


class Simulation:
    """So many machines, each with one rank and its monitor; threads let them look."""

    def __init__(self, size: int, **timeout: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self._pipe = os.pipe()
        names = [f"rank {number} on host{number}" for number in range(size)]
        self.ranks = [
            SimulatedRank(n, size, os.dup(self._pipe[0])) for n in range(size)
        ]
        # What the monitors of which machines print, and those that end their ranks.
        self.printed: list[tuple[int, str]] = []
        self.ended: set[int] = set()
        self._over = threading.Event()
        self.failures: list[BaseException] = []
        self.monitors = [
            self._monitor(number, star_of(number, self.listener, names), timeout)
            for number in range(size)
        ]
        self._threads = [
            threading.Thread(target=self._drive, args=(monitors,), daemon=True)
            for monitors in (
                self.monitors[:1],
                *(self.monitors[n::8] for n in range(1, 9)),
            )
        ]

    def _monitor(
        self, number: int, star: dict[str, Any], timeout: dict[str, Any]
    ) -> Monitor:
        listener = None if number else os.dup(self.listener.fileno())
        config = {
            "timeout": timeout,
            "launch": None,
            "listener": listener,
            "star": star,
        }
        made = Monitor(config, [self.ranks[number]])  # type: ignore[list-item]
        made.tick = 0.0
        printed = lambda text, event=(): self.printed.append((number, text))  # noqa: E731
        made.print = printed  # type: ignore[method-assign]
        return made

    def _drive(self, monitors: list[Monitor]) -> None:
        try:
            while not self._over.wait(0.05):
                for one in list(monitors):
                    if not one.look():
                        self.ended.add(one.ranks[0].world)
                        monitors.remove(one)
        except BaseException as error:
            self.failures.append(error)
            raise

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def cut(self, number: int) -> None:
        """Cut the link to a machine, as both kernels see it at last."""
        hub, spoke = self.monitors[0].star, self.monitors[number].star
        spoke._endpoints = []
        hub._lose(hub.links[number], CUT)
        close(spoke)
        spoke._note(0, True)

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

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for made in self.monitors:
            for key in list(made.selector.get_map().values()):
                if isinstance(key.fileobj, int):
                    os.close(key.fd)
                else:
                    key.fileobj.close()  # type: ignore[attr-defined]
            made.selector.close()
        self.listener.close()
        for end in self._pipe:
            os.close(end)


@contextlib.contextmanager
def simulation(size: int, **timeout: Any) -> Iterator[Simulation]:
    """Monitors that have been started, with this time-out, and end with the block."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    nothing = SimpleNamespace(keep=lambda now: None, scan=lambda: None)
    with (
        mock.patch.object(module, "collect_stacks", return_value={}),
        mock.patch.object(module, "SharedFiles", return_value=nothing),
        mock.patch.object(module, "daemon_of"),
        mock.patch.object(module.processes, "terminate"),
        mock.patch.object(module, "FORWARDING_SECONDS", 0.0),
    ):
        made = Simulation(size, **timeout)
        try:
            made.start()
            yield made
        finally:
            made.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
