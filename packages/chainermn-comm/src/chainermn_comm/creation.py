"""`create_communicator`: a communicator by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .mpi_start import refuse_to_be_alone, require_running_mpi, warn_of_small_shm

# Imported where it is used: it starts MPI, which a data loader's worker process must
# not do just because the user's script imports this package.
if TYPE_CHECKING:
    from mpi4py import MPI

    from .mpi_communicator import MpiCommunicator


def create_communicator(
    communicator_name: str = "hierarchical",
    mpi_comm: MPI.Intracomm | None = None,
    allreduce_grad_dtype: Any = None,
    batched_copy: bool = False,
    *,
    reproducible: bool = False,
) -> MpiCommunicator:
    """Create a communicator (collective over ``mpi_comm``).

    With more than one rank, an uncaught exception on any of them ends the whole job
    from now on (``CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0`` refuses that). Where the ranks
    on a node would start more BLAS threads than it has cores, their number is limited
    from now on, and rank 0 says so (setting ``OMP_NUM_THREADS``, to any number, refuses
    that).

    Args:
        communicator_name: the algorithm for means of gradients, see the table below.
            All give the same bits on every rank; those of different names may differ in
            rounding.
        mpi_comm: an mpi4py intracommunicator, ``MPI.COMM_WORLD`` by default. It is
            duplicated and stays the caller's.
        allreduce_grad_dtype: the dtype in which gradients travel: float16, float32,
            float64 or a bfloat16; None for each one's own. A mean outside of its range
            may become infinite, on GPUs also the mean of a gradient outside of it. On
            one node, means in shared memory ignore a dtype narrower than a gradient's.
        batched_copy: accepted for scripts of ChainerMN 1.3 and without effect.
        reproducible: whether, on the same number of ranks, the bits of means and sums
            follow from the numbers alone: neither from which rank is on which node, nor
            from ``communicator_name``, nor from buckets or chunks. All is summed in the
            order of ranks. It costs nothing where all ranks are on one node, unless
            ``allreduce_grad_dtype`` is narrower than the gradients, which are then
            rounded to it there, too. Over several nodes each rank sends its own
            gradients. With k ranks per node that is k times the bytes. Gradients on
            GPUs take the way of ``flat``, through MPI.

    ==================  ==================================================================
    ``hierarchical``    through memory that a node's ranks share; one rank of each node
                        exchanges with the other nodes
    ``two_dimensional`` the same, but as many ranks as the smallest node has exchange
    ``single_node``     the same, and refuses more than one node
    ``non_cuda_aware``  as ``hierarchical``, but between nodes by MPI
    ``flat``            packed into chunks, straight through MPI
    ``naive``           one by one, straight through MPI
    ``pure_nccl``       for gradients on GPUs only: straight through NCCL
    ``dummy``           nowhere, to measure everything else
    ==================  ==================================================================

    Arrays on GPUs go through NCCL in a node and between nodes. Without NCCL all ranks
    raise an error, and a rank that can't be connected ends the job. Between nodes
    ``non_cuda_aware`` uses host memory instead, and ``flat`` and ``naive`` use it
    everywhere. Where NCCL takes all sums, a mean is enqueued on the current stream; what
    fails then ends the job. This was tested on one GPU only.

    Gradients travel in chunks, whose default size depends on the algorithm. The
    environment variable ``CHAINERMN_CHUNK_BYTES`` overrides it, the same on all ranks:
    a number of bytes, a multiple of 64 from 64 to 2^30. It is read when a communicator
    is made; a split keeps it.

    A call that waits for more than ten minutes is reported, with the rank that it seems
    to wait for. ``CHAINERMN_TIMEOUT``, the same on all ranks, sets another number of
    seconds, at least 1, after which the job is ended too; 0 switches that off. One
    small process a machine does this.

    Where ``CHAINERMN_TRACE`` names a folder, set on all ranks or on none, each rank
    writes there what its communicators do and when; ``chainermn trace`` reads it.

    Returns:
        The communicator. Release it with ``finalize()`` or a ``with`` block.

    Raises:
        TypeError: ``mpi_comm`` is no mpi4py intracommunicator, or COMM_NULL.
        ValueError: there is no such communicator or dtype; an environment variable is
            malformed;
            ``reproducible`` is no bool, or asked of a communicator that isn't the
            library's own; ``single_node`` on several nodes; or ``pure_nccl`` where
            there is no CuPy, GPU or NCCL.
        RuntimeError: no MPI library can be loaded; MPI knows of this rank alone, and
            the launcher has started several; MPI has not been initialized, since
            ``mpi4py.rc.initialize`` is False, or has been finalized; or this is a worker
            process of a rank, where MPI can't be started.
        CommunicationError: MPI has no room for another communicator.
        PeerError: another rank has one of these errors.
        RankMismatchError: on all ranks, when they ask for different communicators.
    """
    warn_of_small_shm()
    require_running_mpi()
    refuse_to_be_alone(mpi_comm)
    from .mpi_communicator import MpiCommunicator
    from .named_communicators import CLASSES

    kind = CLASSES.get(str(communicator_name))
    if kind is None:  # a name of the user's own, or one that all ranks refuse together
        kind = type(
            "MpiCommunicator",
            (MpiCommunicator,),
            {"communicator_name": communicator_name},
        )
    return kind(mpi_comm, allreduce_grad_dtype, batched_copy, reproducible=reproducible)
