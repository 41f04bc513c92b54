"""What the collective operations of one communicator work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from mpi4py import MPI

from ..errors import CommunicationError, SharedFailure, describe_exception
from ..topology import Topology
from .handshake import Handshake

Value = TypeVar("Value")
# Steps that were interrupted and their arguments, kept since MPI may still write to their arrays.
_orphaned_steps: list[Any] = []


@dataclass(frozen=True)
class Context:
    """The ranks of one communicator, and how they communicate."""

    comm: MPI.Intracomm  # carries nothing but this package's traffic
    handshake: Handshake
    tag: int  # this and the next one are of the messages of collective operations
    topology: Topology
    # Aborts the job because of the exception being handled, unless the user refused that.
    abort: Callable[[], None]
    chunk_bytes: int | None = None  # what the user asked for; None for each algorithm's default
    reproducible: bool = False  # sums are taken in the order of ranks, however many there are
    reduce_dtype: Any = None  # NumPy's dtype of the setting; see `chainermn_comm.config.Settings`

    @cached_property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    def run_in_step(self, operation: str, step: Callable[..., Value], *args: Any) -> Value:
        """Take a step that all ranks take together, and return what it returns (collective).

        That is a handshake after which data move, or moving them. An exception ends the job, as the
        others can't know. Where the user refused that, the interruption is recorded: the
        communicator can't be used any more.
        """
        try:
            return step(*args)
        except CommunicationError:  # a handshake raises it on all ranks
            raise
        except BaseException as error:
            self.abort()
            self.handshake.interruptions.append(
                f"{operation} was interrupted on this rank ({describe_exception(error)})"
            )
            _orphaned_steps.append((step, args))
            raise

    def run_on_all_ranks(self, operation: str, part: str, make: Callable[[], Value]) -> Value:
        """Return what ``make`` returns, once it has returned on all ranks (collective).

        It is a ``part`` of the operation. What it raises is raised on all ranks.
        """
        what = f"{operation}, {part}"
        with SharedFailure(self.handshake, what):
            value = make()
        self.run_in_step(operation, self.handshake, what)
        return value
