"""The first machine's monitor and another one's, as far as they are connected."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from selectors import DefaultSelector
from typing import Any
from unittest import mock

from chainermn_comm.watchdog.monitor import first_machine
from chainermn_comm.watchdog.monitor.first_machine import FirstMachine
from chainermn_comm.watchdog.monitor.other_machines import OtherMachines

SECRETS = {"name": "host0", "question": "who?", "answer": "me"}


class Links:
    """A first machine and another one, without monitors."""

    def __init__(self) -> None:
        self.selector = DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.others = OtherMachines(self.selector)
        self.others.listen(os.dup(self.listener.fileno()), SECRETS, 20.0)
        self.heard: list[Any] = []
        self.first = self.connected(self.listener)

    def connected(self, listener: socket.socket, *later: socket.socket) -> FirstMachine:
        """Another machine that connects there, and later to the others."""
        endpoints = [each.getsockname() for each in (listener, *later)]
        where = SECRETS | {"endpoints": endpoints}
        return FirstMachine(self.selector, where, 20.0, self.heard.append)

    def until(self, is_done: Callable[[], object], seconds: float = 10.0) -> bool:
        """Drive all until something holds; whether it did in time."""
        deadline = time.monotonic() + seconds
        while not (done := is_done()) and time.monotonic() < deadline:
            self.poll()
            self.first.keep(time.monotonic())
            self.others.keep(time.monotonic())
        return bool(done)

    def poll(self) -> None:
        for key, _ in self.selector.select(0.01):
            key.data()

    def are_linked(self) -> bool:
        return self.first.is_linked and len(self.others.linked) == 1

    @contextlib.contextmanager
    def stranger(self) -> Iterator[socket.socket]:
        """A connection that has been accepted."""
        with socket.create_connection(self.listener.getsockname()) as made:
            assert self.until(lambda: self.others.strangers)
            yield made

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.listener.close()


def is_alone(machine: FirstMachine) -> bool:
    """Whether there is no connection, not even one that proves nothing yet."""
    return machine._link is None


def impatient() -> contextlib.AbstractContextManager[object]:
    """Meanwhile another machine waits a moment for an answer, and before it tries again."""
    return mock.patch.multiple(first_machine, GREETING_SECONDS=0.2, RETRY_SECONDS=0.1)
