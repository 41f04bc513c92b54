"""The first machine as another one's monitor knows it: a connection to its monitor."""

from __future__ import annotations

import hmac
import math
import os
import socket
import time
from collections.abc import Callable
from selectors import EVENT_READ, BaseSelector
from typing import Any

from .link import Link, Message

# To connect, for which all else waits, and before another attempt.
CONNECT_SECONDS = 1.0
RETRY_SECONDS = 2.0
# For the other side to prove that it is the first machine's monitor.
GREETING_SECONDS = 5.0


class FirstMachine:
    """The first machine; the connection to its monitor is made again where it breaks."""

    def __init__(
        self,
        selector: BaseSelector,
        first_machine: dict[str, Any],
        silence: float,
        handle: Callable[[Message], None],
    ) -> None:
        """Connect; ``handle`` is given the messages that come."""
        self.name: str = first_machine["name"]
        self._secret = first_machine
        self._endpoints = list(first_machine["endpoints"])
        self._selector = selector
        self._silence = silence
        self._handle = handle
        self._own_name = os.urandom(16).hex()
        self._link: Link | None = None
        self._tried_at = -math.inf
        self.keep(time.monotonic())

    @property
    def is_linked(self) -> bool:
        return self._link is not None and self._link.is_proven

    def keep(self, now: float) -> None:
        """Connect where there is no connection, or one that proves nothing."""
        if self._link is None:
            if self._endpoints and now - self._tried_at > RETRY_SECONDS:
                self._tried_at = now
                self._connect()
        elif not self._link.is_proven and now - self._tried_at > GREETING_SECONDS:
            # The kernel accepts connections also for a process that is stopped.
            self._lose()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, if the first machine's monitor can be reached."""
        if self._link is not None and self._link.is_proven:
            try:
                self._link.send(kind, **fields)
            except OSError:
                self._lose()

    def _connect(self) -> None:
        # Another endpoint next time, if this is not the monitor's: the address of a
        # bridge may be the same elsewhere.
        endpoint = self._endpoints.pop(0)
        self._endpoints.append(endpoint)
        try:
            connected = socket.create_connection(endpoint, CONNECT_SECONDS)
        except OSError:
            return
        self._link = Link(connected, self._silence)
        self._selector.register(connected, EVENT_READ, self._read)
        try:
            self._link.send(
                "hello", question=self._secret["question"], machine=self._own_name
            )
        except OSError:
            self._lose()

    def _read(self) -> None:
        link = self._link
        if link is None:
            return
        try:
            for message in link.receive():
                if link.is_proven:
                    self._handle(message)
                else:
                    self._check(message["answer"])
                    link.is_proven = True
        except Exception:  # whatever a stranger sends
            self._lose()

    def _check(self, answer: str) -> None:
        if not hmac.compare_digest(answer, self._secret["answer"]):
            raise ValueError("an answer without the secret")
        self._endpoints = self._endpoints[-1:]

    def _lose(self) -> None:
        if self._link is not None:
            self._selector.unregister(self._link.socket)
            self._link.socket.close()
            self._link = None
