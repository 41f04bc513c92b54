"""A connection between the monitors of two machines: messages, which are lines of JSON.

The kernel ends it when the other machine acknowledges nothing any more; a process that
is stopped there does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from typing import Any

# Bytes of a line: of who has proved nothing yet, and of a monitor with its ranks'
# stacks.
GREETING_BYTES = 1024
LARGEST = 1 << 22
# For the other side to take a message.
SEND_SECONDS = 2.0
# Errors of a link that is cut, or of a machine that is down; any other error says that
# a process has gone.
CUT = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
}

Message = dict[str, Any]


class Link:
    """One side of a connection; any exception means that it is of no use any more."""

    def __init__(self, connected: socket.socket, silence: float) -> None:
        """Take over a socket, which ends ``silence`` seconds after the last acknowledgement."""
        self.socket = connected
        self.is_proven = False  # whether the other side knows the job's secret
        self._rest = b""
        connected.settimeout(SEND_SECONDS)
        pause = int(min(max(1, silence / 8), 3600))
        options = {
            socket.TCP_NODELAY: 1,
            socket.TCP_KEEPIDLE: pause,
            socket.TCP_KEEPINTVL: pause,
            socket.TCP_USER_TIMEOUT: int(1000 * min(silence, 1e6)),
        }
        with contextlib.suppress(OSError):  # a kernel may not have one of these
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in options.items():
                connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def receive(self) -> list[Message]:
        """Return the messages that have come; the socket is ready to be read."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError("the other side has closed it")
        *lines, self._rest = (self._rest + data).split(b"\n")
        most = LARGEST if self.is_proven else GREETING_BYTES
        if len(self._rest) > most:
            raise ValueError("a line is too long")
        return [json.loads(line) for line in lines]


def is_cut(error: Exception | None) -> bool:
    """Return whether an error says that the other machine can't be reached."""
    return isinstance(error, TimeoutError) or (
        isinstance(error, OSError) and error.errno in CUT
    )
