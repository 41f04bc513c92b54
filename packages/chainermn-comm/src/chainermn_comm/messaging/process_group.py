"""What the collective operations of one communicator work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import get_ident
from traceback import walk_tb
from typing import Any, TypeVar

from mpi4py import MPI

from .. import devices
from ..config import Settings
from ..errors import (
    FinalizedError,
    SharedFailure,
    describe_exception,
    is_raised_on_all,
    now,
)
from ..topology import Topology
from .backend import Backend
from .handshake import Handshake

Value = TypeVar("Value")
# Of steps that were interrupted, what they worked on: MPI may still write to their
# arrays.
_orphaned: list[Any] = []


@dataclass(eq=False)
class ProcessGroup:
    """The ranks of one communicator, and how they communicate."""

    comm: MPI.Intracomm  # carries nothing but this package's traffic
    handshake: Handshake
    tag: int  # this and the next one are of the messages of collective operations
    topology: Topology
    # Aborts the job because of the exception being handled, unless the user refused
    # that.
    abort: Callable[[], None]
    settings: Settings = field(default_factory=Settings)
    # For arrays in host memory, and on GPUs. The group that backends themselves have
    # has none.
    host: Backend = None  # type: ignore[assignment]
    device: Backend = None  # type: ignore[assignment]
    is_finalized: bool = False

    def __post_init__(self) -> None:
        self.rank, self.size = self.comm.rank, self.comm.size

    def in_step(self, operation: str) -> InCall:
        """Within, all ranks take the same steps together: handshakes, and moving data.

        What one rank alone raises there ends the job, as the others can't know. Where
        the user refused that, the interruption is recorded: the communicator can't be
        used any more.
        """
        if self.is_finalized:
            raise FinalizedError(
                f"rank {self.rank}: the communicator has been finalized"
            )
        return InCall(self.handshake, operation, self.interrupt)

    def interrupt(self, operation: str, error: BaseException, since: int) -> None:
        """Do what leaving :meth:`in_step` by this error does, where it was entered ``since``."""
        interruptions = self.handshake.interruptions
        if interruptions or is_raised_on_all(error, since):
            return
        self.abort()
        interruptions.append(
            f"{operation} was interrupted on this rank ({describe_exception(error)})"
        )
        found = [
            it
            for frame, _ in walk_tb(error.__traceback__)
            for it in frame.f_locals.values()
        ]
        # Which refers to all frames.
        _orphaned.extend([it for it in found if it is not error])

    def run_or_raise(
        self, operation: str, make: Callable[[], Value], part: str = ""
    ) -> Value:
        """Return what ``make`` returns, once it has returned on all ranks (collective).

        It is the operation, or a ``part`` of it. What it raises is raised on all ranks,
        CUDA's and NCCL's errors as CommunicationError.
        """
        what = f"{operation}, {part}" if part else operation
        with self.in_step(operation):
            told = f"rank {self.rank}: {what}"
            with SharedFailure(self.handshake, what), devices.translated_errors(told):
                value = make()
            self.handshake(what)
            return value


class InCall:
    """Within, one thread uses a communicator; RuntimeError at the entry if another one does.

    It is no generator, which would miss a signal's exception.
    """

    _is_outermost = False  # of this thread's calls

    def __init__(
        self,
        handshake: Handshake,
        operation: str,
        interrupt: Callable[[str, BaseException, int], None] | None = None,
    ) -> None:
        """``interrupt`` is called with what is raised within, and the time of the entry."""
        self._handshake = handshake
        self._operation = operation
        self._interrupt = interrupt
        self._entered = now()

    def __enter__(self) -> bool:
        """Return whether this thread was in no call of the communicator before."""
        handshake, own = self._handshake, get_ident()
        # Threads take turns, and signals come, where functions are called: not between
        # the next lines.
        if handshake.thread is None:
            handshake.thread = own
            handshake.call = self._operation
            self._is_outermost = True
        elif handshake.thread != own:
            raise RuntimeError(
                f"rank {handshake.rank}: {self._operation} was called while {handshake.call} was "
                "under way in another thread: a communicator serves one thread at a time; give "
                "each thread its own, made by split()"
            )
        return self._is_outermost

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is not None and self._interrupt is not None:
                self._interrupt(self._operation, error, self._entered)
        finally:
            if self._is_outermost:
                self._handshake.thread = None
                self._handshake.leave()
