"""The communicators by name, and how each is made."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import abort
from .settings import Settings, wire_dtype
from .topology import Topology

# mpi4py.MPI starts MPI when it is imported, which a data loader's worker process must not do
# just because the user's script imports this package. So it is imported where it is used.
if TYPE_CHECKING:
    from mpi4py import MPI

    from .communicator import MpiCommunicator


@dataclass(frozen=True)
class Recipe:
    """How a communicator is made.

    Attributes:
        batched: whether small gradients travel packed together.
    """

    batched: bool


RECIPES = {
    "naive": Recipe(batched=False),
    "flat": Recipe(batched=True),
}

# Names that ChainerMN documents and that are still to be built.
PLANNED = (
    "hierarchical",
    "two_dimensional",
    "single_node",
    "pure_nccl",
    "non_cuda_aware",
    "dummy",
)


def create_communicator(
    communicator_name: str = "hierarchical",
    mpi_comm: MPI.Intracomm | None = None,
    allreduce_grad_dtype: Any = None,
    batched_copy: bool = False,
) -> MpiCommunicator:
    """Create a communicator (collective over ``mpi_comm``).

    With more than one rank, an uncaught exception on any of them ends the whole job from now
    on (``CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0`` refuses that).

    Args:
        communicator_name: ``naive`` (gradients travel one by one) or ``flat`` (packed into
            chunks). The default, ``hierarchical``, is still served by ``naive``, with a warning.
        mpi_comm: an mpi4py intracommunicator, ``MPI.COMM_WORLD`` by default. It is duplicated
            and stays the caller's.
        allreduce_grad_dtype: float16, float32, float64 or a bfloat16, in which gradients
            travel; None for each one's own dtype.
        batched_copy: accepted for scripts of ChainerMN 1.3 and without effect.

    Returns:
        The communicator. Release it with ``finalize()`` or a ``with`` block.

    Raises:
        ValueError: no such communicator or dtype.
        RankMismatchError: on all ranks, when they ask for different communicators.
    """
    return make_communicator(communicator_name, mpi_comm, allreduce_grad_dtype, batched_copy)


def make_communicator(
    name: str,
    mpi_comm: MPI.Intracomm | None = None,
    allreduce_grad_dtype: Any = None,
    batched_copy: bool = False,
    topology: Topology | None = None,
) -> MpiCommunicator:
    """:func:`create_communicator` with a topology that may be imposed, for tests (collective)."""
    from mpi4py import MPI

    from .agreement import Agreement, prepare
    from .communicator import MpiCommunicator

    comm = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"mpi_comm must be an mpi4py intracommunicator, got {type(comm).__name__}")
    found, problem = prepare(
        lambda: (_recipe(name), Settings(wire_dtype(allreduce_grad_dtype), bool(batched_copy)))
    )
    traffic = comm.Dup()  # the user's communicator may be carrying messages of theirs
    try:
        view = [("communicator", name), ("allreduce_grad_dtype", str(allreduce_grad_dtype))]
        Agreement(traffic)("create_communicator", view, problem=problem)
    finally:
        traffic.Free()
    if name == "hierarchical" and comm.rank == 0:
        warnings.warn(
            "using naive communicator because only naive supports CPU-only execution",
            stacklevel=3,
        )
    abort.install_by_default(comm)
    recipe, settings = found
    return MpiCommunicator(comm, recipe.batched, settings, topology)


def _recipe(name: str) -> Recipe:
    if name == "hierarchical":
        return RECIPES["naive"]
    if name in RECIPES:
        return RECIPES[name]
    built = ", ".join(sorted(RECIPES))
    if name in PLANNED:
        raise ValueError(f"communicator {name!r} isn't built yet; use one of: {built}")
    raise ValueError(f"unknown communicator {name!r}; use one of: {built}")
