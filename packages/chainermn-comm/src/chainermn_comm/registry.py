"""The communicators by name, with the backends of each, and what ranks agree on to make one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from . import environment, faults, runtime, watchdog
from .config import CHUNK_VARIABLE, Settings, chunk_bytes, reproducible, wire_dtype
from .errors import raise_together
from .topology import Topology
from .trace import TRACE_VARIABLE

# mpi4py.MPI starts MPI when it is imported, which a data loader's worker process must
# not do just because the user's script imports this package. So it is imported where it
# is used.
if TYPE_CHECKING:
    from mpi4py import MPI

    from .messaging import BackendFactory


@dataclass(frozen=True)
class Entry:
    """The backends of a communicator, which functions of a `ProcessGroup` make, or their names."""

    host: str | BackendFactory  # for host memory; a name is one in `sums.BACKENDS`
    gpu: str | BackendFactory = "staged"  # for GPUs; a name is one in `gpu.BACKENDS`
    single_node: bool = False  # refuses more than one node


REGISTRY = {
    "naive": Entry("per_tensor"),
    "flat": Entry("bucketed"),
    "hierarchical": Entry("single_leader", "single_leader"),
    "two_dimensional": Entry("multi_leader", "multi_leader"),
    "single_node": Entry("single_leader", "nccl", single_node=True),
    "pure_nccl": Entry("gpus_only", "nccl"),
    "non_cuda_aware": Entry("single_leader", "single_leader_staged"),
    "dummy": Entry("no_op", "no_op"),
}

# Backends whose gradients' algorithm refuses, or sums nothing.
_WITHOUT_SUMS = ("gpus_only", "no_op")


@contextlib.contextmanager
def agreeing(
    name: str,
    mpi_comm: MPI.Intracomm | None,
    allreduce_grad_dtype: Any,
    batched_copy: bool,
    wants_reproducible: bool,
    timeout: watchdog.Timeout | None,
) -> Iterator[
    tuple[MPI.Intracomm, Entry, tuple[BackendFactory, BackendFactory], Settings]
]:
    """Agree on a communicator, which is to be made of these inside of the block (collective).

    ``create_communicator`` says what the arguments are, and what is raised.
    """
    from mpi4py import MPI

    from . import gpu, sums
    from .messaging import Handshake, ProcessGroup
    from .unused import explained, free_unused

    # First: whatever fails on one rank below must not leave the others waiting.
    faults.install_by_default()
    comm = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise TypeError(
            "mpi_comm must be an mpi4py intracommunicator, and not COMM_NULL, got "
            f"{type(comm).__name__}"
        )
    wait = watchdog.Timeout()
    with contextlib.suppress(ValueError):  # which is raised on all ranks below
        wait = timeout or watchdog.timeout_from_env()
    # As ranks of MPI.COMM_WORLD, this process first.
    members = ranks = [*range(comm.rank, comm.size), *range(comm.rank)]
    if comm != MPI.COMM_WORLD:  # some MPIs look for each rank among all
        members = MPI.Group.Translate_ranks(
            comm.Get_group(), ranks, MPI.COMM_WORLD.Get_group()
        )
    # It stands for the communicator that there is not yet.
    group = ProcessGroup(
        comm, Handshake(comm), 0, Topology(()), faults.abort_if_desynchronized
    )
    with (
        watchdog.enforce_init_timeout(wait, members, lambda: faults.mpi_abort(1)),
        watchdog.watch_call("create_communicator", comm.size),
        group.call("create_communicator"),
        explained(group.handshake),
    ):
        free_unused(comm)
        with raise_together(group.handshake, "create_communicator") as agreement:
            environment.check()
            entry = _find(name)
            settings = Settings(
                wire_dtype(allreduce_grad_dtype),
                bool(batched_copy),
                chunk_bytes(),
                reproducible(wants_reproducible),
                timeout or watchdog.timeout_from_env(),
                os.environ.get(TRACE_VARIABLE) or None,
            )
            if settings.reproducible:
                entry = _reproducible(name, entry)
            factories = (
                _named(entry.host, sums.BACKENDS),
                _named(entry.gpu, gpu.BACKENDS),
            )
            agreement.signature = (
                ("communicator", name),
                ("allreduce_grad_dtype", str(settings.allreduce_grad_dtype)),
                (CHUNK_VARIABLE, settings.chunk_bytes),
                ("reproducible", settings.reproducible),
                (watchdog.TIMEOUT_VARIABLE, str(settings.timeout)),
                (watchdog.SILENCE_VARIABLE, settings.timeout.silence),
                (TRACE_VARIABLE, "set" if settings.trace else "unset"),
            )
            agreement.payload = runtime.blas_payload(comm.size)
        if any(agreement.payloads):
            runtime.limit_blas_threads(comm)
        faults.skip_finalize_in_forks()
        yield comm, entry, factories, settings


def _reproducible(name: str, entry: Entry) -> Entry:
    """Return the entry with backends whose bits depend on no topology and no name."""
    if not (isinstance(entry.host, str) and isinstance(entry.gpu, str)):
        raise ValueError(
            f"communicator {name!r} has a backend of its own, which may not be reproducible; "
            "take another name, or leave reproducible out"
        )
    host = entry.host if entry.host in _WITHOUT_SUMS else "rank_ordered"
    gpu = entry.gpu if entry.gpu in _WITHOUT_SUMS else "staged"
    return replace(entry, host=host, gpu=gpu)


def _named(
    backend: str | BackendFactory, known: dict[str, BackendFactory]
) -> BackendFactory:
    if isinstance(backend, str) and backend not in known:
        raise ValueError(
            f"unknown backend {backend!r}; use one of: {', '.join(sorted(known))}"
        )
    return known[backend] if isinstance(backend, str) else backend


def _find(name: str) -> Entry:
    from .gpu import nccl_unavailable_reason

    if not isinstance(name, str) or name not in REGISTRY:
        known = ", ".join(sorted(REGISTRY))
        raise ValueError(f"unknown communicator {name!r}; use one of: {known}")
    if name == "pure_nccl" and (reason := nccl_unavailable_reason()):
        rest = ", ".join(sorted(REGISTRY.keys() - {name}))
        raise ValueError(
            f"communicator 'pure_nccl' is for GPUs, and {reason}; on CPUs use one of: {rest}"
        )
    return REGISTRY[name]
