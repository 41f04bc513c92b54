"""Has ranks watched: before they have met, and the calls on each communicator afterwards.

Once ranks of several machines have met, each tells its monitor where that of the first
machine listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import subprocess
import warnings
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..timeout import Timeout
from . import connection, recorder
from .connection import BACKLOG, job_name, tell_monitor
from .recorder import CallRecorder

if TYPE_CHECKING:
    from mpi4py import MPI

SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface

_has_met = False  # whether the monitor knows what ranks have agreed on
_first_machine: dict[str, Any] | None = None  # where its monitor listens
_num_registered = 0


@contextlib.contextmanager
def watch_meeting(
    operation: str, members: Sequence[int], timeout: Timeout
) -> Iterator[None]:
    """Record the call in which ranks meet, and have it watched although they don't know each other.

    ``members`` are all that must come, by their numbers in MPI.COMM_WORLD, this rank
    first.
    """
    if len(members) > 1 and not connection.is_connected():
        try:
            connection.connect(members, timeout)
        except (OSError, subprocess.SubprocessError) as problem:
            _warn(problem)
    with recorder.watch_call(operation, len(members)):
        yield


def register(comm: MPI.Intracomm, world: int, timeout: Timeout) -> CallRecorder | None:
    """Have the calls on a communicator watched, and return their recorder (collective over it).

    The ``timeout`` is the same on all ranks, and ``world`` this process's rank in
    MPI.COMM_WORLD.
    """
    global _has_met, _num_registered
    if comm.size == 1:
        return None
    from mpi4py import MPI

    _num_registered += 1
    # Rank 0 gives the communicator's name. Two machines' numbers differ, and so do then
    # the greatest and the least of all.
    machine = zlib.crc32(f"{os.uname().nodename} {job_name()}".encode())
    common = array("q", [-1, -1, _first_machine is None, machine, -machine])
    if comm.rank == 0:
        common[0] = world
        common[1] = _num_registered
    comm.Allreduce(MPI.IN_PLACE, common, MPI.MAX)
    first_rank, number, is_any_new, greatest, least = common
    if is_any_new and greatest != -least:
        _agree_on_first_machine(comm, machine)
    if not connection.is_connected():
        return None
    if not _has_met:
        _has_met = True
        tell_monitor({"kind": "met", "timeout": asdict(timeout)})
    return recorder.allocate((first_rank, number), comm.rank, comm.size)


def _warn(problem: object) -> None:
    # As an error it would leave the other ranks waiting.
    with contextlib.suppress(RuntimeWarning):
        warnings.warn(
            f"calls that wait too long won't be reported: {problem}",
            RuntimeWarning,
            stacklevel=5,
        )


def _agree_on_first_machine(comm: MPI.Intracomm, machine: int) -> None:
    """Have the monitors of all machines report to that of rank 0's machine (collective)."""
    global _first_machine
    listener = None
    if comm.rank == 0 and _first_machine is None:
        listener = _listen()
        endpoints: list[tuple[str, int]] = []
        if listener is not None:
            port = listener.getsockname()[1]
            endpoints = [(address, port) for address in own_addresses()]
        _first_machine = {
            "machine": machine,
            "name": os.uname().nodename,
            "endpoints": endpoints,
            "question": secrets.token_hex(16),
            "answer": secrets.token_hex(16),
        }
    agreed = comm.bcast(_first_machine)
    if listener is not None:
        tell_monitor({"kind": "first machine", **agreed}, listener.fileno())
        listener.close()
    elif _first_machine is None and agreed["machine"] != machine:
        # An address that both have is a bridge's, unless they share all (containers of
        # a machine).
        own = own_addresses()
        far = [one for one in agreed["endpoints"] if one[0] not in own]
        tell_monitor(
            {
                "kind": "other machine",
                **agreed,
                "endpoints": far or agreed["endpoints"],
            }
        )
    _first_machine = agreed


def _listen() -> socket.socket | None:
    try:
        return socket.create_server(("", 0), backlog=BACKLOG)
    except OSError as problem:
        _warn(problem)
        return None


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, but for the loopback's."""
    found = []
    # It fails where no file is left.
    with (
        contextlib.suppress(OSError),
        socket.socket(type=socket.SOCK_DGRAM) as probe,
    ):
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return [
        address for address in dict.fromkeys(found) if not address.startswith("127.")
    ]
