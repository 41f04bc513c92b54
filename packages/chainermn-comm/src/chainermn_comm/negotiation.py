"""The agreement of ranks before a communicator is made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

from . import environment, faults, runtime, watchdog
from .communicators import check_name
from .config import (
    CHUNK_VARIABLE,
    NAMES,
    Settings,
    checked_switch,
    chunk_bytes_from_env,
    wire_dtype,
)
from .errors import raise_together
from .messaging import Handshake, ProcessGroup
from .resources import explained, free_unused
from .topology import Topology
from .trace import TRACE_VARIABLE

OPERATION = "create_communicator"


def checked_intracomm(mpi_comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Return the user's communicator, or ``MPI.COMM_WORLD``; raise TypeError if it is neither."""
    if mpi_comm is None:
        return MPI.COMM_WORLD
    if not isinstance(mpi_comm, MPI.Intracomm) or mpi_comm == MPI.COMM_NULL:
        raise TypeError(
            "mpi_comm must be an mpi4py intracommunicator, and not COMM_NULL, got "
            f"{type(mpi_comm).__name__}"
        )
    return mpi_comm


@contextlib.contextmanager
def creating(
    comm: MPI.Intracomm, timeout: watchdog.Timeout | None
) -> Iterator[ProcessGroup]:
    """Watch the block in which ``comm``'s ranks make a communicator (collective).

    A rank that doesn't come, or that fails alone, ends the job. The block gets a group
    that stands for the communicator, which doesn't exist yet.
    """
    wait = watchdog.Timeout()
    with contextlib.suppress(ValueError):  # `negotiate_settings` raises it on all ranks
        wait = timeout or watchdog.timeout_from_env()
    group = ProcessGroup(
        comm, Handshake(comm), 0, Topology(()), faults.abort_if_desynchronized
    )
    members = _world_ranks(comm)
    with (
        watchdog.watch_meeting(OPERATION, members, wait),
        group.call(OPERATION),
        explained(group.handshake),
    ):
        yield group


def _world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of ``comm`` as numbers of ``MPI.COMM_WORLD``, this process first."""
    ranks = [*range(comm.rank, comm.size), *range(comm.rank)]
    if comm == MPI.COMM_WORLD:  # some MPIs search all ranks for each rank
        return ranks
    world = MPI.COMM_WORLD.Get_group()
    return list(MPI.Group.Translate_ranks(comm.Get_group(), ranks, world))


def negotiate_settings(
    group: ProcessGroup,
    name: Any,
    allreduce_grad_dtype: Any,
    batched_copy: bool,
    wants_reproducible: bool,
    timeout: watchdog.Timeout | None,
) -> Settings:
    """Return the settings of a new communicator, which are equal on all ranks (collective).

    Arguments and errors are those of ``create_communicator``.
    """
    comm = group.comm
    free_unused(comm)
    with raise_together(group.handshake, OPERATION) as call:
        environment.check()
        check_name(name)
        settings = Settings(
            allreduce_grad_dtype=wire_dtype(allreduce_grad_dtype),
            batched_copy=bool(batched_copy),
            chunk_bytes=chunk_bytes_from_env(),
            reproducible=checked_switch("reproducible", wants_reproducible),
            timeout=timeout or watchdog.timeout_from_env(),
            trace=os.environ.get(TRACE_VARIABLE) or None,
        )
        if settings.reproducible and name not in NAMES:
            raise ValueError(
                f"communicator {name!r} isn't the library's own and may not be "
                "reproducible; take another name, or leave reproducible out"
            )
        call.signature = (
            ("communicator", name),
            ("allreduce_grad_dtype", str(settings.allreduce_grad_dtype)),
            (CHUNK_VARIABLE, settings.chunk_bytes),
            ("reproducible", settings.reproducible),
            (watchdog.TIMEOUT_VARIABLE, str(settings.timeout)),
            (watchdog.SILENCE_VARIABLE, settings.timeout.silence),
            (TRACE_VARIABLE, "set" if settings.trace else "unset"),
        )
    runtime.limit_blas_threads(comm)
    return settings
