"""How the gradients of one optimizer's parameters become means over ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from chainermn_comm import CommunicatorBase, MeanInProgress

from ..wrappers import UnpicklableMixin
from .parameter_set import ParameterSet


class GradientExchange(UnpicklableMixin, ABC):
    """The exchange of one optimizer; each kind is a class.

    An update computes gradients and hands them in (:meth:`ready`), ranks agree by the mean that
    this returns, and :meth:`finish` gives means to the parameters; or :meth:`discard` ends it
    where nobody steps. Gradients belong to parameters, the objects, whatever
    their paths are.
    """

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        """Exchange on ``communicator``; not collective."""
        self._communicator, self._zero_fill = communicator, zero_fill

    #: Whether all is made that is made by all ranks together.
    is_prepared = True
    #: Whether ranks send gradients before they agree, as they have planned together.
    is_planned = False
    #: Whether what was sent so is not what parameters have after backward.
    must_redo = False
    #: Whether this update's backward told what ranks need to plan that.
    can_plan = False

    def prepare(self, params: ParameterSet) -> None:
        """Make what all ranks make together (collective)."""

    def begin(self) -> None:
        """Begin an update of all ranks."""

    def backward(self, params: ParameterSet, loss: Any, loss_scale: float | None) -> None:
        """Compute the gradients of an update's loss."""
        loss.backward(loss_scale=loss_scale)

    def error(self) -> BaseException | None:
        """Wait for what is under way; return what made it fail, if anything."""
        return None

    @abstractmethod
    def ready(self, params: ParameterSet) -> MeanInProgress:
        """Hand in the present gradients, which are final."""

    @abstractmethod
    def finish(self, factor: float = 1.0) -> bool:
        """Exchange what was handed in (collective, after ranks have agreed on all of it).

        Args:
            factor: by which means are multiplied, the same on all ranks.

        Returns:
            Whether the parameters' gradients are means to step along, perhaps of an update before.
        """

    @abstractmethod
    def discard(self) -> None:
        """Drop what was handed in, and plans: some rank raised, has no plan or nothing to hand in.

        Not collective: ranks may be elsewhere.
        """

    def redo(self) -> None:
        """Drop what was sent, since some rank must redo it: ``ready`` follows (collective)."""

    def plan(self, params: ParameterSet) -> None:
        """Plan what ranks send before they agree, after ``finish`` (collective): all can."""

    def drop(self) -> None:
        """Wait for what is under way and drop it."""

    def forget(self, params: list[Any]) -> None:
        """Drop what is under way of these parameters, which have new values."""

    def flush(self) -> bool:
        """Give means that no step has used yet to the parameters (collective); whether any are."""
        return False

    def serialize(self, serializer: Any, target: Any) -> None:
        """Save or load what is under way.

        Raises:
            ValueError: a snapshot holds something that this kind has no use for.
        """
        if serializer("in_flight", False):
            raise ValueError("the snapshot holds gradients in flight: use double_buffering=True")

    def close(self) -> None:
        """Release what :meth:`prepare` made (collective)."""
