"""The ranks of a communicator, and the context of their calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from traceback import walk_tb
from typing import Any

from mpi4py import MPI

from ..config import Settings
from ..errors import (
    FinalizedError,
    describe_exception,
    is_raised_on_all,
    raise_together,
)
from ..gpu import devices
from ..topology import Topology
from .backend import Backend
from .handshake import Handshake

# The local variables of calls that were interrupted: MPI may still write to their
# arrays.
_orphaned: list[Any] = []


@dataclass(eq=False)
class ProcessGroup:
    """The ranks of one communicator, and how they communicate."""

    comm: MPI.Intracomm  # carries only this package's traffic
    handshake: Handshake
    tag: int  # this tag and the next are for messages of collective operations
    topology: Topology
    # Aborts the job because of the exception being handled, unless the user has
    # refused aborts.
    abort: Callable[[], None]
    settings: Settings = field(default_factory=Settings)
    # The backends for arrays in host memory and on GPUs. The group that a backend refers to
    # has none: the communicator's group would never be unused if its resources, which
    # are freed then, referred to it.
    host: Backend = None  # type: ignore[assignment]
    device: Backend = None  # type: ignore[assignment]
    is_finalized: bool = False

    def __post_init__(self) -> None:
        self.rank = self.comm.rank
        self.size = self.comm.size

    def call(self, operation: str) -> InCall:
        """Return the context of a call, in which all ranks take the same steps together.

        An error of one rank in it ends the job, because the other ranks can't know of
        it. If the user has refused aborts, the interruption is recorded, and the
        communicator can't be used any more.
        """
        if self.is_finalized:
            raise FinalizedError(
                f"rank {self.rank}: the communicator has been finalized"
            )
        return InCall(self.handshake, operation, self.interrupt)

    @contextmanager
    def together(self, what: str) -> Iterator[raise_together]:
        """Raise on all ranks what one rank raises in a part of a call (collective).

        CUDA's and NCCL's errors are raised as CommunicationError.
        """
        with (
            raise_together(self.handshake, what) as call,
            devices.translated_errors(f"rank {self.rank}: {what}"),
        ):
            yield call

    def interrupt(self, operation: str, error: BaseException) -> None:
        """End the job because of an error that this rank alone raises in a call."""
        interruptions = self.handshake.interruptions
        if interruptions:
            return
        self.abort()
        interruptions.append(
            f"{operation} was interrupted on this rank ({describe_exception(error)})"
        )
        for frame, _ in walk_tb(error.__traceback__):
            found = frame.f_locals.values()
            # The error refers to all frames.
            _orphaned.extend([each for each in found if each is not error])


class InCall:
    """One thread's call of a communicator; RuntimeError if another thread is in a call.

    A class, because a generator would miss a signal's exception.
    """

    def __init__(
        self,
        handshake: Handshake,
        operation: str,
        interrupt: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        """``interrupt`` is called with an error inside that not all ranks raise together."""
        self.operation = operation
        self.thread = get_ident()
        self._handshake = handshake
        self._interrupt = interrupt
        # Whether this is the outermost of the thread's calls.
        self._is_outermost = False
        self._reference = weakref.ref(self)

    def __enter__(self) -> bool:
        """Return whether this thread was in no call of the communicator before."""
        handshake = self._handshake
        # Threads switch, and signals arrive, only at function calls: not between these two
        # lines. A signal before `__exit__` leaves a dead reference.
        if handshake.under_way is None or handshake.under_way() is None:
            handshake.under_way = self._reference
            self._is_outermost = True
            return True
        outermost = handshake.under_way()
        if outermost is not None and outermost.thread != self.thread:
            raise RuntimeError(
                f"rank {handshake.rank}: {self.operation} was called while "
                f"{outermost.operation} was under way in another thread: a communicator "
                "serves one thread at a time; give each thread its own, made by split()"
            )
        return False

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        handshake = self._handshake
        try:
            if error is None or self._interrupt is None:
                return
            if not is_raised_on_all(handshake, error):
                self._interrupt(self.operation, error)
        finally:
            if self._is_outermost:
                handshake.under_way = None
                handshake.leave(error)
