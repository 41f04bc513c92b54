"""A connection between two monitors: lines of JSON, each with a proof that its sender is one.

Both sides first send random digits. Each line has an HMAC of these, of its number and
contents, with the secret that the ranks exchanged through MPI. The kernel ends a
connection whose other machine acknowledges nothing any more; a process that is stopped
there does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import re
import socket
from collections.abc import Iterator
from typing import Any

# Bytes of a line: of who has proved nothing yet, and of a monitor with its ranks'
# stacks.
GREETING_BYTES, LARGEST = 1024, 1 << 22
# For the other side to take what is sent, which is little.
SEND_SECONDS = 2.0
# The link is cut or the machine is down; any other error says that a process has gone.
CUT = {
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ENETDOWN,
}
# The message that a connection begins with, which has no proof; and how that looks.
DIGITS, DIGITS_LINE = "digits", re.compile(rb"[0-9a-f]{32}")

Message = dict[str, Any]


class Connection:
    """One side of a connection; any exception means that it is of no use any more."""

    def __init__(self, sock: socket.socket, secret: str, silence: float) -> None:
        """Take over a socket, which ends ``silence`` seconds after the last acknowledgement."""
        self.socket, self._secret = sock, secret.encode()
        self.number = 0  # of the other machine, once it has proved what it is
        sock.settimeout(SEND_SECONDS)
        pause = int(min(max(1, silence / 8), 3600))
        with contextlib.suppress(OSError):  # a kernel may not have one of these
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_NODELAY, 1),
                (socket.TCP_KEEPIDLE, pause),
                (socket.TCP_KEEPINTVL, pause),
                (socket.TCP_USER_TIMEOUT, int(1000 * min(silence, 1e6))),
            ):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._mine, self._theirs = os.urandom(16).hex(), ""
        self._sent = self._heard = 0
        self._rest = b""
        sock.sendall(f"{self._mine}\n".encode())

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; only once digits have come."""
        body = json.dumps({"kind": kind, **fields})
        proof = self._proof(f"{self._mine} {self._theirs} {self._sent} {body}")
        self._sent += 1
        self.socket.sendall(f"{proof} {body}\n".encode())

    def receive(self) -> Iterator[Message]:
        """Return the messages that have come, of a socket that can be read."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError("the other side has closed it")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > (LARGEST if self._heard else GREETING_BYTES):
            raise ValueError("a line is too long")
        for line in lines:
            if not self._theirs:
                if not DIGITS_LINE.fullmatch(line):
                    raise ValueError("no digits")
                self._theirs = line.decode()
                yield {"kind": DIGITS}
                continue
            proof, _, body = line.decode().partition(" ")
            expected = self._proof(f"{self._theirs} {self._mine} {self._heard} {body}")
            if not hmac.compare_digest(proof, expected):
                raise ValueError("a message without proof, or that was sent before")
            self._heard += 1
            yield json.loads(body)

    def _proof(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), "sha256").hexdigest()


def is_cut(error: BaseException | None) -> bool:
    """Return whether an error says that the other machine can't be reached."""
    return isinstance(error, OSError) and error.errno in CUT
