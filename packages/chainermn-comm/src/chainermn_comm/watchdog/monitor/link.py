"""A connection between the monitors of two machines: messages, which are lines of JSON.

The kernel ends the connection when the other machine stops acknowledging, but not when
only a process is stopped there. A broken link is not made again.
"""

from __future__ import annotations

import hmac
import json
import math
import socket
import time
from collections.abc import Callable
from selectors import EVENT_READ, BaseSelector
from typing import Any

# The maximum bytes of a line, which may have the stacks of a machine's ranks.
LARGEST = 1 << 22
# How long the other side may take to receive a message.
SEND_SECONDS = 2.0
# The longest silence that the kernel accepts, in seconds.
LONGEST_SILENCE = 1e5

Message = dict[str, Any]


class Link:
    """One side of a connection, which is closed at any error."""

    def __init__(
        self,
        selector: BaseSelector,
        connected: socket.socket,
        secret: str,
        silence: float,
        handle: Callable[[Message], None],
    ) -> None:
        """Take over a socket.

        Args:
            selector: tells when data have arrived.
            connected: the socket.
            secret: the secret that the first message must bring.
            silence: seconds after the last acknowledgement at which the link ends.
            handle: called with each message.
        """
        self.is_proven = False  # whether the secret has come
        self.is_open = True
        # Set while the link is open, or if a process has ended it.
        self.cut_at = -math.inf
        self._selector = selector
        self._socket = connected
        self._secret = secret
        self._handle = handle
        self._rest = b""
        connected.settimeout(SEND_SECONDS)
        silence = min(silence, LONGEST_SILENCE)
        pause = int(max(1, silence / 8))
        milliseconds = int(1000 * silence)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        selector.register(connected, EVENT_READ, self._read)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, if the link is open."""
        data = json.dumps({"kind": kind, **fields}).encode()
        if self.is_open:
            try:
                self._socket.sendall(data + b"\n")
            except OSError as error:
                self.close(error)

    def close(self, error: Exception | None = None) -> None:
        """Close the link, because of an error or because it isn't needed any more."""
        if self.is_open:
            self.is_open = False
            self._selector.unregister(self._socket)
            self._socket.close()
        # A reset means that a process is gone; any other error, that a link or a machine
        # is.
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            self.cut_at = time.monotonic()

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
            if not data or len(self._rest) > LARGEST:
                raise EOFError("the other side has closed it, or sends nonsense")
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if not self.is_proven:
                    if not hmac.compare_digest(message["secret"], self._secret):
                        raise ValueError("a greeting without the secret")
                    self.is_proven = True
                self._handle(message)
        except Exception as error:  # a stranger may send anything
            self.close(error)
