"""Lets the monitors of a job's machines ask one another, over TCP.

A question and its answer are a line of JSON each, over a connection of their own. Both sides prove
that they know the secret that the ranks told one another through MPI, which itself never travels
here: both choose random digits, and each line has an HMAC of these and of all that was said.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

CONNECT_SECONDS = 1.0
# After a connection that could not be taken.
REFUSED_SECONDS = 0.1
LARGEST_QUESTION, LARGEST_ANSWER = 4096, 1 << 26
# So that no side's proof is taken for the other's.
ASKED, ANSWERED = "asked", "answered"
# Of a machine, in its name.
MOST_RANKS = 8
# Of Linux: the address of an interface.
SIOCGIFADDR = 0x8915

Answer = Callable[[str], dict[str, Any]]


def addresses() -> list[str]:
    """This machine's IPv4 addresses, but for the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


class Peer:
    """The monitor of another machine."""

    def __init__(self, where: dict[str, Any]) -> None:
        """Know where it listens, as `starting` describes it; it is asked nothing yet."""
        self.host: str = where["host"]
        ranks = where["ranks"]
        listed = ", ".join(map(str, ranks[:MOST_RANKS])) + ", ..." * (len(ranks) > MOST_RANKS)
        # With its ranks' numbers in MPI.COMM_WORLD.
        self.name = f"rank{'s' * (len(ranks) > 1)} {listed} on {self.host}"
        self._addresses: list[str] = where["addresses"]
        self._port, self._secret = where["port"], where["secret"]
        # When it last answered.
        self.heard: float | None = None
        # Whether its ranks have ended, or nobody listens there any more.
        self.has_ended = False

    def ask(self, question: str, seconds: float) -> dict[str, Any]:
        """Its answer.

        Raises:
            OSError: there is none.
        """
        problem: Exception = OSError("no address")
        for address in self._addresses:
            try:
                answer = self._ask(address, question, seconds)
            except (OSError, ValueError, TypeError, AttributeError) as error:
                problem = error
                continue
            # Others may be the same on several machines, such as a bridge's.
            self._addresses = [address]
            self.heard = time.monotonic()
            return answer
        if self.heard is not None and isinstance(problem, ConnectionRefusedError):
            self.has_ended = True
        raise OSError(f"{self.host} doesn't answer: {problem}")

    def _ask(self, address: str, question: str, seconds: float) -> dict[str, Any]:
        with socket.create_connection((address, self._port), CONNECT_SECONDS) as connection:
            connection.settimeout(seconds)
            nonce = os.urandom(16).hex()
            with connection.makefile("rb") as file:
                challenge = file.readline(LARGEST_QUESTION).decode().strip()
                asked = ASKED, challenge, nonce, question
                connection.sendall(_line(_proof(self._secret, *asked), nonce, question))
                proof, text = json.loads(file.readline(LARGEST_ANSWER))
        _check(proof, self._secret, ANSWERED, *asked, text)
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError(f"no answer: {found!r}")
        return found


class Asking:
    """A question to several peers at once."""

    def __init__(self, peers: list[Peer], question: str, seconds: float) -> None:
        """Ask; answers that take longer are none."""
        self._deadline = time.monotonic() + seconds
        self._peers = peers
        self._came: dict[Peer, dict[str, Any]] = {}
        self._in_time: dict[Peer, dict[str, Any]] = {}
        self._threads = [
            threading.Thread(target=self._ask, args=(peer, question, seconds), daemon=True)
            for peer in peers
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, peer: Peer, question: str, seconds: float) -> None:
        with contextlib.suppress(OSError):
            self._came[peer] = peer.ask(question, seconds)

    def answers(self) -> list[dict[str, Any]]:
        """Those that come in time."""
        for thread in self._threads:
            thread.join(max(0.0, self._deadline - time.monotonic()))
        self._in_time = dict(self._came)
        return list(self._in_time.values())

    def silent(self) -> list[str]:
        """The names of those that gave none; to be asked for after the answers."""
        return sorted(peer.name for peer in self._peers if peer not in self._in_time)


def serve(listener: socket.socket, secret: str, answer: Answer) -> None:
    """Answer questions until the listener is closed; to be run in a thread of its own."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # such as that no file is left: at once it would be so again
            if listener.fileno() < 0:
                return
            time.sleep(REFUSED_SECONDS)
            continue
        one = threading.Thread(target=_answer, args=(connection, secret, answer), daemon=True)
        try:
            one.start()
        except RuntimeError:  # there may be no more threads
            connection.close()
            time.sleep(REFUSED_SECONDS)


def _answer(connection: socket.socket, secret: str, answer: Answer) -> None:
    with connection, contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        connection.settimeout(CONNECT_SECONDS)
        challenge = os.urandom(16).hex()
        connection.sendall(f"{challenge}\n".encode())
        with connection.makefile("rb") as file:
            proof, nonce, question = json.loads(file.readline(LARGEST_QUESTION))
        asked = ASKED, challenge, nonce, question
        _check(proof, secret, *asked)
        text = json.dumps(answer(question))
        connection.sendall(_line(_proof(secret, ANSWERED, *asked, text), text))


def _line(*parts: str) -> bytes:
    return f"{json.dumps(parts)}\n".encode()


def _proof(secret: str, *parts: str) -> str:
    """What only who knows the secret can say of these."""
    return hmac.new(secret.encode(), json.dumps(parts).encode(), "sha256").hexdigest()


def _check(proof: str, secret: str, *parts: str) -> None:
    """Raise ValueError for whoever doesn't know the secret."""
    if not hmac.compare_digest(proof.encode(), _proof(secret, *parts).encode()):
        raise ValueError("a line without proof")


def keep_asking(peer: Peer, pause: float) -> None:
    """Find out again and again whether a peer is there; to be run in a thread of its own."""
    while not peer.has_ended:
        with contextlib.suppress(OSError, KeyError):
            # After the end of its ranks a machine may go, which is no cut link.
            peer.has_ended = peer.ask("alive", 2 * pause)["ended"]
        time.sleep(pause)
