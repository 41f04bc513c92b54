"""`create_communicator`: a communicator by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .mpi_start import refuse_to_be_alone, require_running_mpi, warn_of_small_shm

# Imported late, because the import starts MPI. A data loader's worker process must not
# start MPI just because the user's script imports this package.
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

    With more than one rank, an uncaught exception on any rank ends the whole job from
    now on, unless ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0``. If the ranks of a node would
    start more BLAS threads than the node has cores, their number is limited from now
    on, and rank 0 says so, unless ``OMP_NUM_THREADS`` is set.

    Args:
        communicator_name: the algorithm for means of gradients, see the table below.
            Every algorithm gives all ranks the same bits. Different algorithms may
            differ in rounding.
        mpi_comm: an mpi4py intracommunicator, by default ``MPI.COMM_WORLD``. It is
            duplicated and stays the caller's.
        allreduce_grad_dtype: the dtype in which gradients travel: float16, float32,
            float64 or a bfloat16; None for each gradient's own. A mean outside of the
            dtype's range may become infinite; on GPUs, so may the mean of a gradient
            outside of the range. On one node, communicators with shared memory ignore a
            dtype that is narrower than a gradient's.
        batched_copy: accepted for scripts of ChainerMN 1.3, without effect.
        reproducible: whether the bits of means and sums depend only on the numbers and
            on the number of ranks: not on the nodes of ranks, ``communicator_name``,
            buckets or chunks. Sums are taken in the order of ranks. The option costs
            nothing if all ranks are on one node, unless ``allreduce_grad_dtype`` is
            narrower than the gradients, which are then rounded there, too. Over several
            nodes each rank sends its own gradients: with k ranks per node, k times the
            bytes. Gradients on GPUs go through MPI, as with ``flat``.

    ==================  ==================================================================
    ``hierarchical``    through memory that a node's ranks share; one rank of each node
                        exchanges with the other nodes
    ``two_dimensional`` the same, but as many ranks as the smallest node has exchange
    ``single_node``     as ``hierarchical``, but refuses more than one node
    ``non_cuda_aware``  as ``hierarchical``, but between nodes by MPI
    ``flat``            packed into chunks, straight through MPI
    ``naive``           one by one, straight through MPI
    ``pure_nccl``       for gradients on GPUs only: straight through NCCL
    ``dummy``           nowhere, to measure everything else
    ==================  ==================================================================

    Arrays on GPUs go through NCCL in a node and between nodes. Without NCCL all ranks
    raise an error, and a rank that can't be connected ends the job. Between nodes
    ``non_cuda_aware`` uses host memory instead, and ``flat`` and ``naive`` use host
    memory everywhere. If NCCL takes all sums, a mean is enqueued on the current stream,
    and a later failure ends the job.

    Gradients travel in chunks, whose default size depends on the algorithm. The
    environment variable ``CHAINERMN_CHUNK_BYTES``, the same on all ranks, sets another
    size: a number of bytes, a multiple of 64 from 64 to 2^30. It is read when a
    communicator is created, and :meth:`~CommunicatorBase.split` keeps it.

    A call that waits for more than ten minutes is reported, with the rank that it seems
    to wait for. ``CHAINERMN_TIMEOUT``, the same on all ranks, sets another number of
    seconds, at least 1, after which the job also ends; 0 turns reports off. One small
    process per machine does this.

    If ``CHAINERMN_TRACE`` names a folder, on all ranks or on none, each rank writes there
    what its communicators do and when; ``chainermn trace`` reads it.

    Returns:
        The communicator. Release it with ``finalize()`` or a ``with`` block.

    Raises:
        TypeError: ``mpi_comm`` is no mpi4py intracommunicator, or is COMM_NULL.
        ValueError: the communicator's name or the dtype is unknown; an environment
            variable is malformed; ``reproducible`` is no bool, or the communicator isn't
            the library's own and can't be reproducible; ``single_node`` has ranks on
            several nodes; ``pure_nccl`` lacks CuPy, a GPU or NCCL.
        RuntimeError: no MPI library can be loaded; MPI knows of this rank alone, but
            the launcher has started several; MPI has not been initialized, because
            ``mpi4py.rc.initialize`` is False, or has been finalized; or this is a worker
            process of a rank, in which MPI can't be started.
        CommunicationError: MPI has no room for another communicator.
        PeerError: another rank has one of these errors.
        RankMismatchError: ranks ask for different communicators; raised on all ranks.
    """
    warn_of_small_shm()
    require_running_mpi()
    refuse_to_be_alone(mpi_comm)
    from .mpi_communicator import MpiCommunicator
    from .named_communicators import CLASSES

    kind = CLASSES.get(str(communicator_name))
    if (
        kind is None
    ):  # a name that the user has added, or that all ranks refuse together
        kind = type(
            "MpiCommunicator",
            (MpiCommunicator,),
            {"communicator_name": communicator_name},
        )
    return kind(mpi_comm, allreduce_grad_dtype, batched_copy, reproducible=reproducible)
