"""What ranks on several hosts exchange: large messages, host by host, and with communicators."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn_tools.bench.timing import NAP_SECONDS
from chainermn_tools.bench.values import fill_pattern, matches_pattern
from chainermn_tools.doctor.cluster.agent import listen
from chainermn_tools.doctor.communicator_tests import try_communicator
from chainermn_tools.doctor.rank_job import overload_reason

if TYPE_CHECKING:
    from mpi4py import MPI

# Elements of a message: more than any switch or MPI sends at once.
COUNT = 1 << 20
# Messages go there and back so often, unless that takes longer.
MAX_ROUNDS, ROUNDS_SECONDS = 3, 2.0
# Within it some of a large message must have moved.
STALL_SECONDS = 8.0
PIECE_BYTES = 1 << 18
Report = Callable[..., None]


def exchange_messages(
    world: MPI.Intracomm,
    hosts: Sequence[str],
    pairs: Sequence[tuple[str, str, str | None]],
    report: Report,
) -> bool:
    """Send a large message there and back between each two hosts, one pair at a time (collective).

    A plain TCP connection carries as much first: it shows what the link can do, and if that stalls
    MPI isn't tried.

    Args:
        world: all ranks.
        hosts: the name of each rank's host.
        pairs: names of two hosts, and an address at which the first one finds the second; without
            one there is no TCP connection.
        report: is called by the first host's rank with ``pair=[a, b]`` and what was found:
            ``stalled``, or ``right``, ``seconds`` of a message, ``tcp_seconds``, the number of
            ``bytes``, and whether one of the hosts is ``overloaded``.

    Returns:
        Whether no connection stalled; the same on all ranks.
    """
    succeeded = True
    for a, b, address in pairs:
        if a in hosts and b in hosts:
            first, second = hosts.index(a), hosts.index(b)
            if world.rank == first:
                found = _send_and_return(world, second, address)
                report(pair=[a, b], **found)
                succeeded = succeeded and not found["stalled"]
            elif world.rank == second:
                _receive_and_return(world, first, address)
            _barrier(world)
    return all(world.allgather(succeeded))


def exchange_with_communicators(world: MPI.Intracomm, names: Sequence[str], report: Report) -> None:
    """Try communicators as on one machine, but for their speed (collective).

    Args:
        world: all ranks.
        names: of the communicators.
        report: is called by rank 0 with ``communicator=name`` and what was ``found``.
    """
    for name in names:
        found = try_communicator(world, name, timed=False)
        if world.rank == 0:
            report(communicator=name, found=found)


def _send_and_return(world: MPI.Intracomm, other: int, address: str | None) -> dict[str, Any]:
    """Be the first of a pair; return what :func:`exchange_messages` reports."""
    sent, got = np.empty(COUNT, np.float32), np.empty(COUNT, np.float32)
    fill_pattern(sent, world.rank)
    port, overloaded = world.recv(source=other)
    times: list[float] = []
    tcp: list[float] = []
    right, more, started = True, True, time.perf_counter()
    while more:
        if address is not None:
            took = _send_over_tcp(address, port)
            world.send(took is not None, other)
            if took is None:
                return {"stalled": True}
            tcp.append(took)
        begin = time.perf_counter()
        world.Send(sent, other)
        world.Recv(got, other)
        times.append((time.perf_counter() - begin) / 2)
        right = right and matches_pattern(got, COUNT, plus=world.rank)
        got.fill(0)
        more = len(times) < MAX_ROUNDS and time.perf_counter() - started < ROUNDS_SECONDS
        world.send(more, other)
    return {
        "stalled": False,
        "right": right,
        "seconds": min(times),
        "tcp_seconds": min(tcp, default=None),
        "bytes": sent.nbytes,
        "overloaded": overloaded or bool(overload_reason()),
    }


def _receive_and_return(world: MPI.Intracomm, other: int, address: str | None) -> None:
    """Be the second of a pair: receive what comes, and send it back."""
    got = np.empty(COUNT, np.float32)
    with listen() as listener:
        listener.settimeout(STALL_SECONDS)
        world.send((listener.getsockname()[1], bool(overload_reason())), other)
        more = True
        while more:
            if address is not None:
                with contextlib.suppress(OSError):  # the other one notices, too
                    _receive_over_tcp(listener, got.nbytes)
                if not world.recv(source=other):
                    return
            world.Recv(got, other)
            world.Send(got, other)
            more = world.recv(source=other)


def _send_over_tcp(address: str, port: int) -> float | None:
    """Return the seconds that a plain connection takes for as much; None where it stalls."""
    nbytes, piece = 4 * COUNT, bytes(PIECE_BYTES)
    try:
        with socket.create_connection((address, port), STALL_SECONDS) as connection:
            begin = time.perf_counter()
            for _ in range(nbytes // PIECE_BYTES):
                connection.sendall(piece)
            connection.recv(1)
            return time.perf_counter() - begin
    except OSError:
        return None


def _receive_over_tcp(listener: socket.socket, nbytes: int) -> None:
    """Read what :func:`_send_over_tcp` sends, and acknowledge it."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(STALL_SECONDS)
        remaining, buffer = nbytes, bytearray(PIECE_BYTES)
        while remaining:
            read = connection.recv_into(buffer)
            if not read:
                return
            remaining -= read
        connection.sendall(b"!")


def _barrier(world: MPI.Intracomm) -> None:
    """Wait for all ranks without keeping a core busy (collective)."""
    done = world.Ibarrier()
    while not done.Test():
        time.sleep(NAP_SECONDS)
