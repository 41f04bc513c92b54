"""What sums and moves arrays among ranks: a backend, and the algorithm of its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ..layout import NextOperand, Operand
from . import messages

if TYPE_CHECKING:
    from .process_group import ProcessGroup

# Arrays, contiguous in C or Fortran order, each with the other rank.
Parts: TypeAlias = Iterable[tuple[int, Any]]


class Algorithm(ABC):
    """Sums arrays over ranks."""

    @abstractmethod
    def allreduce(self, operand: Operand) -> None:
        """Write the sum over ranks of each source, divided, into its target (collective).

        Beside sources and targets this takes a few chunks of memory, and a copy of each
        source that is not C-contiguous.
        """

    def prepare(self, operand: Operand) -> Callable[[], None]:
        """Do the part of :meth:`allreduce` that needs no other rank, and writes to no target.

        The function that it returns does the rest (collective). It is to be called once
        all ranks have prepared alike and have passed a barrier since, or not at all.
        """
        return partial(self.allreduce, operand)

    def stream(self, next_operand: NextOperand) -> None:
        """Sum operands as they come, the same on all ranks (collective)."""
        while (operand := next_operand(True)) is not None:
            self.allreduce(operand)

    def close(self) -> None:  # noqa: B027  (optional: an algorithm may own nothing)
        """Release what the algorithm owns (collective)."""

    def release_local(self) -> None:  # noqa: B027  (likewise)
        """Release what needs no other rank (not collective)."""


# Makes an algorithm for the ranks of a group (collective).
Factory: TypeAlias = Callable[["ProcessGroup"], Algorithm]


class Backend(Algorithm):
    """Sums and moves arrays in one kind of memory among a group's ranks.

    Ranks have agreed before each call: they know the sizes of what they get, and list
    the arrays between two of them in the same order. A rank's own stay where they are.
    On GPUs results are there in the order of the current stream. Gradients' operands
    say in which dtype they may travel; users' arrays travel in their own.

    Attributes:
        group: the ranks.
        is_local: whether gradients go through no network.
        made: what :meth:`for_gradients` returns; None before, which is so on all ranks or on none.
    """

    is_local = False

    def __init__(self, group: ProcessGroup, gradients: Factory | None = None) -> None:
        """Make nothing with memory yet (not collective): only later is a device chosen.

        ``gradients`` makes what sums them; without it :meth:`allreduce` does.
        """
        self.group, self._make = group, gradients
        self.made: Algorithm | None = None

    def for_gradients(self) -> Algorithm:
        """Return what sums gradients; the first call makes it (collective)."""
        if self.made is None:
            make = self._make or self._connected
            group = self.group
            what = "preparing sums"
            group.handshake.begin(what)  # what makes it waits for all ranks
            with group.together(what):
                made = make(group)
            self.made = made
        return self.made

    def _connected(self, group: ProcessGroup) -> Algorithm:
        if not self.connect():
            raise RuntimeError(
                f"rank {group.rank}: {type(self).__name__} connects no ranks"
            )
        return self

    def takes(self, arrays: Sequence[Any], op: Any = None) -> bool:
        """Return whether these arrays, all on GPUs, can stay there now, or none (not collective).

        ``op`` is the ufunc of a sum. If a rank's can't, all copy theirs to host memory.
        """
        return False

    def connect(self) -> bool:
        """Return whether the ranks are connected; the first call does that (collective)."""
        return True

    @abstractmethod
    def allocate(self, header: bytes) -> messages.Message:
        """Return an empty message with that header, in this backend's kind of memory."""

    @abstractmethod
    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        """Send arrays, and overwrite those that come (collective)."""

    def allgather(self, outgoing: Parts, incoming: Parts) -> None:
        """Do that where a rank sends the same to all, and has a copy of it among what comes."""
        self.exchange(outgoing, incoming)

    @abstractmethod
    def broadcast(self, parts: Parts) -> None:
        """Overwrite each array on all ranks by that of the rank beside it (collective)."""

    @abstractmethod
    def reduce_scatter(
        self, rows: Sequence[Sequence[Any]], targets: Sequence[Any], op: Any
    ) -> None:
        """Write what a ufunc makes of all ranks' rows for this rank into targets (collective)."""

    def close(self) -> None:
        if self.made not in (None, self):
            self.made.close()
        self.made = None

    def release_local(self) -> None:
        if self.made not in (None, self):
            self.made.release_local()
        self.made = None


# Makes a backend of a group, and raises nothing (not collective).
BackendFactory: TypeAlias = Callable[["ProcessGroup"], Backend]
