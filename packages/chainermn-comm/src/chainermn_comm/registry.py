"""The communicators by name, with the algorithms of each, and how one is created."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import faults, runtime, watchdog
from .config import CHUNK_VARIABLE, Settings, chunk_bytes, wire_dtype
from .topology import Topology
from .trace import TRACE_VARIABLE, trace_folder

# mpi4py.MPI starts MPI when it is imported, which a data loader's worker process must not do
# just because the user's script imports this package. So it is imported where it is used.
if TYPE_CHECKING:
    from mpi4py import MPI

    from .allreduce import Factory
    from .mpi_communicator import MpiCommunicator


@dataclass(frozen=True)
class Entry:
    """The algorithms of a communicator: functions of a `Context`, or names of such functions."""

    host: str | Factory  # for gradients in host memory; a name is one in `allreduce.FACTORIES`
    gpu: str | Factory = "mpi"  # for those on GPUs; a name is one in `gpu.FACTORIES`
    single_node: bool = False  # refuses more than one node


REGISTRY = {
    "naive": Entry("per_tensor"),
    "flat": Entry("bucketed"),
    "hierarchical": Entry("single_leader", "single_leader"),
    "two_dimensional": Entry("multi_leader", "multi_leader"),
    "single_node": Entry("single_leader", "nccl_only", single_node=True),
    "pure_nccl": Entry("gpus_only", "nccl_only"),
    "non_cuda_aware": Entry("single_leader", "single_leader_staged"),
    "dummy": Entry("no_op", "no_op"),
}


def create_communicator(
    communicator_name: str = "hierarchical",
    mpi_comm: MPI.Intracomm | None = None,
    allreduce_grad_dtype: Any = None,
    batched_copy: bool = False,
) -> MpiCommunicator:
    """Create a communicator (collective over ``mpi_comm``).

    With more than one rank, an uncaught exception on any of them ends the whole job from now
    on (``CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0`` refuses that). Where the ranks on a node would
    start more BLAS threads than it has cores, their number is limited from now on, and rank 0
    says so (setting ``OMP_NUM_THREADS``, to any number, refuses that).

    Args:
        communicator_name: the algorithm for means of gradients, see the table below. All give the
            same bits on every rank; those of different names may differ in rounding.
        mpi_comm: an mpi4py intracommunicator, ``MPI.COMM_WORLD`` by default. It is duplicated
            and stays the caller's.
        allreduce_grad_dtype: the dtype in which gradients travel: float16, float32, float64 or a
            bfloat16; None for each one's own. A mean outside of its range may become infinite, on
            GPUs also the mean of a gradient outside of it. Communicators that share memory on one
            node send nothing there, and round to no dtype narrower than a gradient's.
        batched_copy: accepted for scripts of ChainerMN 1.3 and without effect.

    ==================  ==================================================================
    ``hierarchical``    through memory that a node's ranks share; one rank of each node
                        exchanges with the other nodes
    ``two_dimensional`` the same, but as many ranks as the smallest node has exchange
    ``single_node``     the same, and refuses more than one node
    ``non_cuda_aware``  as ``hierarchical``; never gives MPI memory of GPUs
    ``flat``            packed into chunks, straight through MPI
    ``naive``           one by one, straight through MPI
    ``pure_nccl``       for gradients on GPUs only: straight through NCCL
    ``dummy``           nowhere, to measure everything else
    ==================  ==================================================================

    Gradients on GPUs go through NCCL in a node, and between nodes through MPI; those of ``flat``
    and ``naive`` through MPI only. MPI gets GPU memory where it is CUDA-aware on all ranks
    (``MPIX_Query_cuda_support``), except by ``non_cuda_aware``; else host memory.

    Gradients travel in chunks, whose default size depends on the algorithm. The environment
    variable ``CHAINERMN_CHUNK_BYTES`` overrides it, the same on all ranks: a number of bytes, a
    multiple of 64 from 64 to 2^30. It is read when a communicator is made; a split keeps it.

    A call that waits for more than ten minutes is reported, with the rank that the others seem to
    wait for first, and goes on waiting. ``CHAINERMN_TIMEOUT``, the same on all ranks, sets
    another number of seconds, from 1 on, after which the job is ended too; 0 switches that off.
    The first communicator of more than one rank starts it, one small process a machine.

    Where ``CHAINERMN_TRACE`` names a folder, set on all ranks or on none, each rank writes there
    what its communicators do and when; ``chainermn trace`` reads it.

    Returns:
        The communicator. Release it with ``finalize()`` or a ``with`` block.

    Raises:
        TypeError: ``mpi_comm`` is no mpi4py intracommunicator.
        ValueError: there is no such communicator, dtype, size of chunks or time-out;
            ``single_node`` on several nodes; or ``pure_nccl`` where there is no CuPy, GPU or NCCL.
        PeerError: another rank has one of these errors.
        RankMismatchError: on all ranks, when they ask for different communicators.
    """
    return make_communicator(communicator_name, mpi_comm, allreduce_grad_dtype, batched_copy)


def make_communicator(
    name: str,
    mpi_comm: MPI.Intracomm | None = None,
    allreduce_grad_dtype: Any = None,
    batched_copy: bool = False,
    topology: Topology | None = None,
    timeout: watchdog.Timeout | None = None,
) -> MpiCommunicator:
    """:func:`create_communicator` for tests, which may impose a topology and a time-out."""
    from mpi4py import MPI

    from . import allreduce, gpu
    from .messaging import Handshake, SharedFailure
    from .mpi_communicator import MpiCommunicator

    # First: whatever fails on one rank below must not leave the others waiting.
    faults.install_by_default()
    comm = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"mpi_comm must be an mpi4py intracommunicator, got {type(comm).__name__}")
    wait = watchdog.Timeout()
    with contextlib.suppress(ValueError):  # which is raised on all ranks below
        wait = timeout or watchdog.timeout_from_env()
    # As ranks of MPI.COMM_WORLD, this process first.
    ranks = [*range(comm.rank, comm.size), *range(comm.rank)]
    members = MPI.Group.Translate_ranks(comm.Get_group(), ranks, MPI.COMM_WORLD.Get_group())
    with (
        watchdog.enforce_init_timeout(wait, members, lambda: faults.mpi_abort(1)),
        watchdog.watch_call("create_communicator", comm.size),
    ):
        traffic = comm.Dup()  # the user's communicator may be carrying messages of theirs
        try:
            handshake = Handshake(traffic)
            with SharedFailure(handshake, "create_communicator"):
                entry = _find(name)
                settings = Settings(
                    wire_dtype(allreduce_grad_dtype),
                    bool(batched_copy),
                    chunk_bytes(),
                    timeout or watchdog.timeout_from_env(),
                    trace_folder(),
                )
            signature = (
                ("communicator", name),
                ("allreduce_grad_dtype", str(settings.allreduce_grad_dtype)),
                (CHUNK_VARIABLE, settings.chunk_bytes),
                (watchdog.TIMEOUT_VARIABLE, str(settings.timeout)),
                (TRACE_VARIABLE, "set" if settings.trace else "unset"),
            )
            payload = runtime.blas_payload(comm.size)
            payloads = handshake("create_communicator", signature, payload)
        finally:
            traffic.Free()
        if any(payloads):
            runtime.limit_blas_threads(comm)
        faults.skip_finalize_in_forks()
        factories = _resolve(entry.host, allreduce.FACTORIES), _resolve(entry.gpu, gpu.FACTORIES)
        made = MpiCommunicator(comm, factories, settings, topology)
    if entry.single_node and made.inter_size > 1:
        made.finalize()
        raise ValueError(
            f"rank {comm.rank}: communicator {name!r} takes ranks of one node, and these are on "
            f"{made.inter_size}; use 'hierarchical'"
        )
    return made


def _resolve(factory: str | Factory, named: dict[str, Factory]) -> Factory:
    return named[factory] if isinstance(factory, str) else factory


def _find(name: str) -> Entry:
    if not isinstance(name, str) or name not in REGISTRY:
        known = ", ".join(sorted(REGISTRY))
        raise ValueError(f"unknown communicator {name!r}; use one of: {known}")
    if name == "pure_nccl":
        from .gpu import nccl_unavailable_reason

        reason = nccl_unavailable_reason()
        if reason is not None:
            rest = ", ".join(sorted(REGISTRY.keys() - {name}))
            raise ValueError(
                f"communicator 'pure_nccl' is for GPUs, and {reason}; on CPUs use one of: {rest}"
            )
    return REGISTRY[name]
