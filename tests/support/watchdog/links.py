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

AGREED = {"name": "host0", "question": "who?", "answer": "me"}


class Links:
    """A first machine and another one, without monitors."""

    def __init__(self) -> None:
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

    @contextlib.contextmanager
    def stranger(self) -> Iterator[socket.socket]:
        """A connection of somebody else."""
        with socket.create_connection(self.listener.getsockname()) as made:
            yield made

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.listener.close()


def impatient() -> contextlib.AbstractContextManager[object]:
    """Meanwhile another machine waits a moment for an answer, and before it tries again."""
    return mock.patch.object(first_machine, "RETRY_SECONDS", 0.1)
