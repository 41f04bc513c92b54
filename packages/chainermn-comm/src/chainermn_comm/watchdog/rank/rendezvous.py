"""Lets monitors watch ranks before they have met, and calls on each communicator afterwards.

Once ranks of several machines have met, each tells its monitor the address of the first
machine's monitor.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import warnings
import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..status_region import WORLD
from ..timeout import Timeout
from . import connection, recorder
from .connection import BACKLOG, job_name, tell_monitor
from .recorder import CallRecorder

if TYPE_CHECKING:
    from mpi4py import MPI

# No rank registers so many communicators.
MOST_REGISTERED = 1 << 32

_first_machine: dict[str, Any] | None = None  # where this machine's monitor listens
_num_registered = 0


@contextlib.contextmanager
def watch_meeting(
    operation: str, members: Sequence[int], timeout: Timeout
) -> Iterator[None]:
    """Record the call in which ranks meet, and let it be watched before they know each other.

    ``members`` are the numbers in MPI.COMM_WORLD of all ranks that must come, this rank
    first.
    """
    if len(members) > 1 and not connection.is_connected():
        try:
            connection.connect(members, timeout)
        except OSError as problem:
            _warn(problem)
    if not connection.is_connected():
        yield
        return
    record = recorder.allocate(WORLD, 0, len(members))
    record.collective(operation, 0)
    try:
        yield
    finally:
        record.release()


def register(comm: MPI.Intracomm, world: int) -> CallRecorder | None:
    """Have the calls on a communicator watched, and return their recorder (collective over it).

    ``world`` is this process's rank in MPI.COMM_WORLD.
    """
    global _num_registered
    if comm.size == 1:
        return None
    from mpi4py import MPI

    _num_registered += 1
    machine = zlib.crc32(f"{os.uname().nodename} {job_name()}".encode())
    # A number that only this process has. The number of the process with the largest rank
    # in MPI.COMM_WORLD becomes the communicator's.
    communicator = world * MOST_REGISTERED + _num_registered
    # The maximum of `-machine` is the negated minimum of the machines' numbers. If minimum
    # and maximum are equal, all ranks are on one machine.
    common = array("q", [communicator, _first_machine is None, machine, -machine])
    comm.Allreduce(MPI.IN_PLACE, common, MPI.MAX)
    communicator, is_any_new, greatest, least_negated = common
    if is_any_new and greatest != -least_negated:
        _introduce_first_machine(comm, machine)
    if not connection.is_connected():
        return None
    return recorder.allocate(communicator, comm.rank, comm.size)


def _warn(problem: object) -> None:
    # An error would leave the other ranks waiting.
    with contextlib.suppress(RuntimeWarning):
        warnings.warn(
            f"calls that wait too long won't be reported: {problem}",
            RuntimeWarning,
            stacklevel=5,
        )


def _introduce_first_machine(comm: MPI.Intracomm, machine: int) -> None:
    """Let all machines' monitors connect to the monitor of rank 0's machine (collective)."""
    global _first_machine
    listener = None
    if comm.rank == 0 and _first_machine is None:
        endpoints: list[tuple[str, int]] = []
        try:
            listener = socket.create_server(("", 0), backlog=BACKLOG)
        except OSError as problem:
            _warn(problem)
        else:
            port = listener.getsockname()[1]
            endpoints = [(address, port) for address in own_addresses()]
        _first_machine = {
            "machine": machine,
            "name": os.uname().nodename,
            "endpoints": endpoints,
            # Each side of a connection shows one half, to prove that it belongs to the
            # job.
            "question": secrets.token_hex(16),
            "answer": secrets.token_hex(16),
        }
    description = comm.bcast(_first_machine)
    if listener is not None:
        tell_monitor({"kind": "first machine", **description}, listener.fileno())
        listener.close()
    elif _first_machine is None and description["machine"] != machine:
        tell_monitor({"kind": "other machine", **description})
    _first_machine = description


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, except the loopback's."""
    routes = ""
    with contextlib.suppress(OSError), open("/proc/net/fib_trie") as file:
        routes = file.read()
    found = re.findall(r"\|-- (?!127\.)(\S+)\n +/32 host LOCAL", routes)
    return sorted(set(found))
