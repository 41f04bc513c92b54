"""Lets the monitors of a job's machines query one another, over TCP.

A query and its reply are a line of JSON each, over a connection of their own. Both sides prove
that they know the secret that the ranks exchanged through MPI, which never travels here: both
choose random digits, and each line has an HMAC of these and of all that was sent before.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .roster import Machine

CONNECT_SECONDS = 1.0
# After a connection that could not be taken.
REFUSED_SECONDS = 0.1
LARGEST_QUERY, LARGEST_REPLY = 4096, 1 << 26
# So that no side's proof is taken for the other's.
QUERY, REPLY = "query", "reply"
# Of Linux: the address of an interface; the scope of IPv6 addresses that are no link's or host's.
SIOCGIFADDR, GLOBAL_SCOPE = 0x8915, "00"
# What is raised where there is no reply, or a query or a reply can't be read.
NO_REPLY = (OSError, LookupError, TypeError, ValueError, AttributeError)

Reply = Callable[[str], dict[str, Any]]


def own_addresses() -> list[str]:
    """Return this machine's IPv4 and global IPv6 addresses, but for the loopback's."""
    found = []
    # It fails where no file is left.
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    with contextlib.suppress(OSError):  # the kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == GLOBAL_SCOPE:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def addresses_towards(own: list[str], hosts: Iterable[list[str]]) -> list[str]:
    """Return this machine's addresses from which packets go to hosts with these `own_addresses`."""
    found = set()
    for addresses in hosts:
        # An address that both have is a bridge's, unless they share all (containers of a machine).
        theirs = [address for address in addresses if address not in own] or addresses
        found |= {_source_address(address) for address in theirs}
    return sorted(found - {""})


def _source_address(target: str) -> str:
    """Return the address that packets to another one come from; "" if there is no route."""
    with contextlib.suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(addresses: list[str]) -> list[socket.socket]:
    """Return a listening socket for each of these addresses that allows it; OSError for none."""
    listeners = []
    for address in addresses:
        with contextlib.suppress(OSError):  # such as an IPv6 address that isn't ready
            where = (address, 0)
            listeners.append(socket.create_server(where, family=_family(address), backlog=128))
    if not listeners:
        known = ", ".join(addresses) or "none has a route to the job's other hosts"
        raise OSError(f"no address to listen on ({known})")
    return listeners


class Peer:
    """The monitor of another machine."""

    def __init__(self, machine: Machine, secret: str) -> None:
        """Know where it listens; nothing is sent yet."""
        self.host, self.name = machine.host, machine.name
        self._endpoints = list(machine.endpoints)
        self._secret = secret
        self.last_heartbeat: float | None = None  # when it last replied
        # Whether its ranks have ended, or nobody listens there any more.
        self.has_finished = False

    def query(self, kind: str, seconds: float) -> dict[str, Any]:
        """Return its reply; OSError where there is none in time."""
        deadline = time.monotonic() + seconds
        problem: Exception = OSError("no address")
        for endpoint in self._endpoints:
            try:
                reply = self._query(endpoint, kind, deadline)
            except NO_REPLY as error:
                problem = error
                continue
            # Others may be the same on several machines, such as a bridge's.
            self._endpoints = [endpoint]
            self.last_heartbeat = time.monotonic()
            return reply
        if self.last_heartbeat is not None and isinstance(problem, ConnectionRefusedError):
            self.has_finished = True
        raise OSError(f"{self.host} doesn't answer: {problem}")

    def _query(self, endpoint: tuple[str, int], kind: str, deadline: float) -> dict[str, Any]:
        seconds = min(CONNECT_SECONDS, _left(deadline))
        with socket.create_connection(endpoint, seconds) as connection:
            connection.settimeout(_left(deadline))
            nonce = os.urandom(16).hex()
            with connection.makefile("rb") as file:
                challenge = file.readline(LARGEST_QUERY).decode().strip()
                query = QUERY, challenge, nonce, kind
                connection.sendall(_line(_proof(self._secret, *query), nonce, kind))
                connection.settimeout(_left(deadline))
                proof, text = json.loads(file.readline(LARGEST_REPLY))
        _check(proof, self._secret, REPLY, *query, text)
        reply: dict[str, Any] = json.loads(text)
        return reply


def _left(deadline: float) -> float:
    """Return the seconds until then; OSError where it is over."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time is over")
    return seconds


def serve(listener: socket.socket, secret: str, reply: Reply) -> None:
    """Reply to queries until the listener is closed; to be run in a thread of its own."""
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
        except OSError:  # such as that no file is left: at once it would be so again
            time.sleep(REFUSED_SECONDS)
            continue
        one = threading.Thread(target=_serve_one, args=(connection, secret, reply), daemon=True)
        try:
            one.start()
        except RuntimeError:  # there may be no more threads
            connection.close()
            time.sleep(REFUSED_SECONDS)


def _serve_one(connection: socket.socket, secret: str, reply: Reply) -> None:
    with connection, contextlib.suppress(*NO_REPLY):
        connection.settimeout(CONNECT_SECONDS)
        challenge = os.urandom(16).hex()
        connection.sendall(f"{challenge}\n".encode())
        with connection.makefile("rb") as file:
            proof, nonce, kind = json.loads(file.readline(LARGEST_QUERY))
        query = QUERY, challenge, nonce, kind
        _check(proof, secret, *query)
        text = json.dumps(reply(kind))
        connection.sendall(_line(_proof(secret, REPLY, *query, text), text))


def _line(*parts: str) -> bytes:
    return f"{json.dumps(parts)}\n".encode()


def _proof(secret: str, *parts: str) -> str:
    """Return the HMAC of these."""
    return hmac.new(secret.encode(), json.dumps(parts).encode(), "sha256").hexdigest()


def _check(proof: str, secret: str, *parts: str) -> None:
    """Raise ValueError if the proof was made without the secret."""
    if not hmac.compare_digest(proof.encode(), _proof(secret, *parts).encode()):
        raise ValueError("a line without proof")


def poll_heartbeat(peer: Peer, pause: float) -> None:
    """Find out again and again whether a peer is there; to be run in a thread of its own."""
    while not peer.has_finished:
        with contextlib.suppress(OSError, LookupError, TypeError):
            # After the end of its ranks a machine may go, which is no cut link.
            peer.has_finished = peer.query("alive", 2 * pause)["finished"]
        time.sleep(pause)
