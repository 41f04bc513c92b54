"""A backend sums and moves arrays among ranks; it has an algorithm that sums gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..layout import Operand
from . import messages

if TYPE_CHECKING:
    from .process_group import ProcessGroup

# Pairs of another rank and an array, contiguous in C or Fortran order.
Parts: TypeAlias = Iterable[tuple[int, Any]]


class Algorithm(ABC):
    """Sums arrays over ranks."""

    @abstractmethod
    def allreduce(self, operand: Operand) -> None:
        """Write the sum over ranks of each source, divided, into its target (collective).

        Beside sources and targets this takes a few chunks of memory, and a copy of each
        source that is not C-contiguous.
        """

    def begin(self, operand: Operand) -> Callable[[], None] | None:
        """Begin an ``allreduce`` without other ranks; return the rest of it, or None.

        Not collective. Between the beginning and the rest, all ranks pass a barrier,
        such as a handshake, in which they agree that all have begun. If the result is
        None or some rank hasn't begun, the caller calls ``allreduce``.
        """
        return None

    def close(self) -> None:  # noqa: B027  (optional: an algorithm may own nothing)
        """Release what the algorithm owns (collective)."""

    def release_local(self) -> None:  # noqa: B027  (likewise)
        """Release what needs no other rank (not collective)."""


# Makes an algorithm for the ranks of a group (collective). An error of one rank is raised
# on all ranks, except in steps that all ranks take together: such steps are a ``call`` of
# the group, in which an error ends the job.
MakeSum: TypeAlias = Callable[["ProcessGroup"], Algorithm]


class Backend(ABC):
    """Sums and moves users' arrays in one kind of memory, and has an algorithm for gradients.

    Ranks have agreed before each call: they know the sizes of what they get, and list
    the arrays between two of them in the same order. A rank's own arrays stay where
    they are. On GPUs results are complete in the order of the current stream.
    Gradients' operands say in which dtype they may travel; users' arrays travel in
    their own dtypes.

    Attributes:
        group: the ranks.
        is_local: whether gradients go through no network.
        made_gradient_sum: what :meth:`gradient_sum` has made; None before its first call,
            on all ranks or on none.
        made_array_sum: the algorithm that sums users' arrays, once it has been made, if
        it is another algorithm.
    """

    is_local = False
    made_array_sum: Algorithm | None = None

    def __init__(self, group: ProcessGroup, make_gradient_sum: MakeSum) -> None:
        """Allocate nothing yet (not collective): the user chooses a device only later."""
        self.group = group
        self._make_gradient_sum = make_gradient_sum
        self.made_gradient_sum: Algorithm | None = None

    def gradient_sum(self) -> Algorithm:
        """Return the algorithm that sums gradients; the first call makes it (collective)."""
        if self.made_gradient_sum is None:
            group = self.group
            operation = "preparing sums"
            # Making the algorithm takes a while, so the watchdog must see this wait for
            # all ranks.
            group.handshake.begin(operation)
            with group.together(operation):
                made = self._make_gradient_sum(group)
            self.made_gradient_sum = made
        return self.made_gradient_sum

    def can_stay_on_gpu(self, arrays: Sequence[Any], op: Any = None) -> bool:
        """Return whether these arrays, all on GPUs, can stay there now, or none (not collective).

        ``op`` is the ufunc of a sum. If one rank's arrays can't stay, all ranks copy
        theirs to host memory.
        """
        return False

    def connect(self) -> bool:
        """Connect the ranks at the first call; return whether they are connected (collective)."""
        return True

    @abstractmethod
    def allreduce(self, operand: Operand) -> None:
        """Write the sum over ranks of each source, divided, into its target (collective)."""

    @abstractmethod
    def allocate(self, header: bytes) -> messages.Message:
        """Return an empty message with that header, in this backend's kind of memory."""

    @abstractmethod
    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        """Send arrays, and overwrite those that come (collective)."""

    def allgather(self, outgoing: Parts, incoming: Parts) -> None:
        """Like :meth:`exchange`, when each rank sends one array to everyone, itself included."""
        self.exchange(outgoing, incoming)

    @abstractmethod
    def broadcast(self, parts: Parts) -> None:
        """Overwrite each array, on all ranks, by its value on the rank beside it (collective)."""

    @abstractmethod
    def reduce_scatter(self, sources: Sequence[Any], target: Any, op: Any) -> None:
        """Reduce all ranks' ``sources[rank]`` by the ufunc ``op`` into the target (collective)."""

    def close(self) -> None:
        """Release what the backend and its gradient sum own (collective)."""
        if self.made_gradient_sum is not None:
            self.made_gradient_sum.close()
            self.made_gradient_sum = None

    def release_local(self) -> None:
        """Release what needs no other rank (not collective)."""
        if self.made_gradient_sum is not None:
            self.made_gradient_sum.release_local()
            self.made_gradient_sum = None
