"""A connection between two monitors: lines of JSON, once both have shown that they know the secret.

The ranks exchanged the secret through MPI, and it never travels here: both sides choose random
digits, and each sends an HMAC of all of these. The kernel ends a connection whose other machine
acknowledges nothing any more; a process that is stopped there does no harm.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import socket
from typing import Any

# Bytes of a line: of who hasn't shown the secret yet, and of a monitor with its ranks' stacks.
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
    errno.ENONET,
}


class Connection:
    """One side of a connection; OSError or ValueError means that it is of no use any more."""

    def __init__(self, sock: socket.socket, silence: float) -> None:
        """Take over a socket, which ends ``silence`` seconds after the last acknowledgement."""
        self.socket = sock
        sock.settimeout(SEND_SECONDS)
        with contextlib.suppress(OSError):  # a kernel may not have one of these
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            pause = int(min(max(1, silence / 8), 3600))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
            sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * min(silence, 1e6))
            )
        self._nonce = os.urandom(16).hex()
        self._received = b""
        self._limit = GREETING_BYTES

    def greet(self) -> None:
        """Send this side's random digits, as the first thing that it does."""
        self.send(self._nonce)

    def prove(self, secret: str, theirs: Any, side: str, number: int) -> None:
        """Send the proof of one ``side``, which machine ``number`` has, for the other's digits."""
        self.send([number, _proof(secret, side, number, theirs, self._nonce)])

    def check(self, secret: str, theirs: Any, side: str, proof: Any) -> int:
        """Return the number of the machine that sent a proof; ValueError if it is none."""
        number, digest = proof
        if not hmac.compare_digest(digest, _proof(secret, side, number, self._nonce, theirs)):
            raise ValueError("a proof without the secret")
        self._limit = LARGEST
        return int(number)

    def send(self, value: Any) -> None:
        """Send a line."""
        self.socket.sendall(f"{json.dumps(value)}\n".encode())

    def receive(self) -> list[Any]:
        """Return the lines that have come, of a socket that can be read."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError("the other side has closed it")
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > self._limit:
            raise ValueError("a line is too long")
        return [json.loads(line) for line in lines]


def _proof(secret: str, *parts: Any) -> str:
    return hmac.new(secret.encode(), json.dumps(parts).encode(), "sha256").hexdigest()


def is_cut(error: BaseException) -> bool:
    """Return whether an error says that the other machine can't be reached."""
    return isinstance(error, OSError) and error.errno in CUT
