"""The exchange that an update waits for."""

from __future__ import annotations

from chainermn_comm import CommunicatorBase, MeanInProgress

from ..profiling import region
from .agreement import OPERATION
from .detached_gradients import multiply_gradients
from .gradient_exchange import GradientExchange
from .parameter_set import ParameterSet


class SynchronousExchange(GradientExchange):
    """Each update steps along the mean of its own gradients."""

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        super().__init__(communicator, zero_fill)
        self._handed_in: tuple[MeanInProgress, ParameterSet] | None = None

    def ready(self, params: ParameterSet) -> MeanInProgress:
        mean = self._communicator.start_mean(self._zero_fill, OPERATION)
        # Who takes the mean by a method of its own is given the model, and may look at all of it.
        mean.add(params if mean.takes_plans else params.target)
        self._handed_in = mean, params
        return mean

    def finish(self, factor: float = 1.0) -> bool:
        assert self._handed_in is not None  # else nothing was ready
        mean, params = self._handed_in
        self._handed_in = None
        with region("communication"):
            mean.reduce()
            mean.assign()
        if factor != 1:
            multiply_gradients(params.params, factor)
        return True

    def discard(self) -> None:
        self._handed_in = None
