"""What ranks on several hosts exchange: large messages, host by host, and with communicators."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn_tools.bench.timing import NAP_SECONDS
from chainermn_tools.bench.values import fill, is_filled
from chainermn_tools.doctor.hosts.remote import listen
from chainermn_tools.doctor.live import trying
from chainermn_tools.jobs import available_cores

if TYPE_CHECKING:
    from mpi4py import MPI

# More than any switch or MPI sends at once, and 0.4 s of a slow link.
COUNT = 1 << 20
# So often, unless that takes longer.
ROUNDS, ROUNDS_SECONDS = 3, 2.0
# Within it some of a large message must have moved.
STALL_SECONDS = 8.0
PIECE_BYTES = 1 << 18
Say = Callable[..., None]


def messages(
    world: MPI.Intracomm,
    hosts: Sequence[str],
    pairs: Sequence[tuple[str, str, str | None]],
    say: Say,
) -> bool:
    """Send a large message there and back between each two hosts, one pair at a time (collective).

    A plain TCP connection carries as much first: it shows what the link can do, and if that stalls
    MPI isn't tried.

    Args:
        world: all ranks.
        hosts: the name of each rank's host.
        pairs: names of two hosts, and an address at which the first one finds the second; without
            one there is no TCP connection.
        say: is told by the first host's rank ``trying=[a, b]``, and then ``pair=[a, b]`` with what
            was found: ``stalled``, or ``right``, ``seconds`` of a message, ``tcp_seconds``, the
            number of ``bytes``, and whether one of the hosts is ``busy``.

    Returns:
        Whether no connection stalled; the same on all ranks.
    """
    well = True
    for a, b, address in pairs:
        if a in hosts and b in hosts:
            first, second = hosts.index(a), hosts.index(b)
            if world.rank == first:
                say(trying=[a, b])
                found = _ask(world, second, address)
                say(pair=[a, b], **found)
                well = well and not found["stalled"]
            elif world.rank == second:
                _answer(world, first, address)
            _wait_for_all(world)
    return all(world.allgather(well))


def communicators(world: MPI.Intracomm, names: Sequence[str], say: Say) -> None:
    """Try communicators as on one machine, but for their speed (collective).

    Args:
        world: all ranks.
        names: of the communicators.
        say: is told by rank 0 ``trying=name``, and then ``communicator=name`` and ``found``.
    """
    for name in names:
        if world.rank == 0:
            say(trying=name)
        found = trying.communicator(world, name, timed=False)
        if world.rank == 0:
            say(communicator=name, found=found)


def _ask(world: MPI.Intracomm, other: int, address: str | None) -> dict[str, Any]:
    """Be the first of a pair; see :func:`messages`."""
    sent, got = np.empty(COUNT, np.float32), np.empty(COUNT, np.float32)
    fill(sent, world.rank)
    port, busy = world.recv(source=other)
    times: list[float] = []
    tcp: list[float] = []
    right, more, began = True, True, time.perf_counter()
    while more:
        if address is not None:
            took = _stream(address, port)
            world.send(took is not None, other)
            if took is None:
                return {"stalled": True}
            tcp.append(took)
        begun = time.perf_counter()
        world.Send(sent, other)
        world.Recv(got, other)
        times.append((time.perf_counter() - begun) / 2)
        right = right and is_filled(got, COUNT, plus=world.rank)
        got.fill(0)
        more = len(times) < ROUNDS and time.perf_counter() - began < ROUNDS_SECONDS
        world.send(more, other)
    return {
        "stalled": False,
        "right": right,
        "seconds": min(times),
        "tcp_seconds": min(tcp, default=None),
        "bytes": sent.nbytes,
        "busy": busy or _busy(),
    }


def _answer(world: MPI.Intracomm, other: int, address: str | None) -> None:
    """Be the second of a pair: take what comes, and send it back."""
    got = np.empty(COUNT, np.float32)
    with listen() as listener:
        listener.settimeout(STALL_SECONDS)
        world.send((listener.getsockname()[1], _busy()), other)
        more = True
        while more:
            if address is not None:
                with contextlib.suppress(OSError):  # the other one notices, too
                    _take(listener, got.nbytes)
                if not world.recv(source=other):
                    return
            world.Recv(got, other)
            world.Send(got, other)
            more = world.recv(source=other)


def _stream(address: str, port: int) -> float | None:
    """Seconds in which a plain connection carries as much; None where it stalls."""
    nbytes, piece = 4 * COUNT, bytes(PIECE_BYTES)
    try:
        with socket.create_connection((address, port), STALL_SECONDS) as connection:
            begun = time.perf_counter()
            for _ in range(nbytes // PIECE_BYTES):
                connection.sendall(piece)
            connection.recv(1)
            return time.perf_counter() - begun
    except OSError:
        return None


def _take(listener: socket.socket, nbytes: int) -> None:
    """Read what :func:`_stream` sends, and say that it has come."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(STALL_SECONDS)
        left, room = nbytes, bytearray(PIECE_BYTES)
        while left:
            read = connection.recv_into(room)
            if not read:
                return
            left -= read
        connection.sendall(b"!")


def _busy() -> bool:
    """Whether there is more to do on this host than its cores can."""
    usable: int = available_cores()["usable"]
    return os.getloadavg()[0] > usable


def _wait_for_all(world: MPI.Intracomm) -> None:
    """A barrier in which nobody keeps a core busy."""
    done = world.Ibarrier()
    while not done.Test():
        time.sleep(NAP_SECONDS)
