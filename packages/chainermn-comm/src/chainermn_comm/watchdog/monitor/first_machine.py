"""A monitor's connection to the monitor of the first machine."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from selectors import BaseSelector
from typing import Any

from .link import Link, Message

# Seconds to connect, in which this monitor does nothing else; and seconds to wait for an
# answer before the next attempt.
CONNECT_SECONDS = 1.0
RETRY_SECONDS = 5.0


class FirstMachine:
    """The first machine, to whose monitor this monitor connects once."""

    def __init__(
        self,
        selector: BaseSelector,
        description: Message,
        silence: float,
        handle: Callable[[Message], None],
    ) -> None:
        """Keep the first machine's description, which its ranks sent to all ranks.

        ``handle`` is given each message of the first machine's monitor.
        """
        self.name: str = description["name"]
        self._description = description
        self._selector = selector
        self._silence = silence
        self._handle = handle
        self._link: Link | None = None
        self._tried_at = -math.inf

    @property
    def is_linked(self) -> bool:
        return self._link is not None and self._link.is_proven and self._link.is_open

    def connect_if_due(self, now: float) -> None:
        """Connect, unless the monitor has answered; another program may listen there."""
        if self._link is not None and self._link.is_proven:
            return
        endpoints = self._description["endpoints"]
        if not endpoints or now - self._tried_at < RETRY_SECONDS:
            return
        self._tried_at = now
        if self._link is not None:
            self._link.close()
        # Try the next address next time, since the address of a bridge may be this
        # machine's own.
        endpoint = endpoints.pop(0)
        endpoints.append(endpoint)
        try:
            connected = socket.create_connection(endpoint, CONNECT_SECONDS)
        except OSError:
            return
        secret = self._description["answer"]
        self._link = Link(
            self._selector, connected, secret, self._silence, self._handle
        )
        self.send("hello", secret=self._description["question"])

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, if there is a link."""
        if self._link is not None:
            self._link.send(kind, **fields)
