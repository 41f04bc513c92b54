"""How the gradients of one optimizer's parameters become means over ranks."""

from __future__ import annotations

import contextlib
from typing import Any

from chainermn_comm import CommunicatorBase, Reducer

from ..background_thread import raise_if_any
from ..profiling import region
from ..wrappers import UnpicklableMixin
from .decision import OPERATION
from .gradient_set import GradientSet, multiply_gradients, set_scale
from .parameter_set import ParameterSet

# What is under way is four times as much: a link of 1 Gbit/s stays busy between two
# looks of a thread that seldom has the interpreter, and small messages of others wait 4
# ms behind it at most. See docs/decisions/double_buffering.md.
PIECE_BYTES = 125 << 10


class GradientExchange(UnpicklableMixin):
    """The exchange of one optimizer, which an update waits for; other kinds are subclasses.

    An update computes gradients and hands them in (:meth:`ready`), ranks agree by the
    reducer that this returns, and :meth:`finish` gives means to the parameters; or
    :meth:`cancel` ends it where nobody steps.
    """

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        """Exchange on ``communicator``; not collective."""
        self._communicator, self._zero_fill = communicator, zero_fill
        # For another thread, while the training uses the given one; all ranks have it,
        # or none.
        self.channel: CommunicatorBase | None = None
        self._handed_in: tuple[Reducer, Any, float | None] | None = None
        # Under way, or means once they have come.
        self._flight: GradientSet | None = None

    #: Whether what was sent during backward is not what parameters have now.
    must_resend = False
    #: Whether this update's backward showed what ranks need to plan what they send in the next.
    can_plan = False

    @property
    def has_flight(self) -> bool:
        """Whether gradients that no step has used yet are under way, or are means already."""
        return self._flight is not None

    def can_send(self, params: ParameterSet, loss: Any, scale: float | None) -> bool:
        """Return whether the gradients of this loss can leave during backward, as planned."""
        return False

    def backward(
        self, params: ParameterSet, loss: Any, loss_scale: float | None
    ) -> None:
        """Compute gradients."""
        loss.backward(loss_scale=loss_scale)

    def backward_and_send(
        self, params: ParameterSet, loss: Any, loss_scale: float | None
    ) -> None:
        """Compute gradients that leave meanwhile; all ranks have agreed to."""
        raise NotImplementedError

    def error(self) -> BaseException | None:
        """Return what made the exchange under way fail, if anything, once it has ended."""
        return None

    def ready(self, params: ParameterSet, scale: float | None) -> Reducer:
        """Hand in the present gradients, which are final, with this loss scale."""
        reducer = self._communicator.make_reducer(self._zero_fill, OPERATION)
        # A communicator with its own method for the mean gets the model, and may look
        # at all of it.
        reducer.add(params if reducer.takes_plans else params.target)
        self._handed_in = reducer, params, scale
        return reducer

    def finish(self, factor: float = 1.0) -> bool:
        """Exchange what was handed in (collective, after ranks have agreed on all of it).

        Means are multiplied by ``factor``, the same on all ranks. Return whether the
        parameters' gradients are means to step along, perhaps of an update before.
        """
        assert self._handed_in is not None  # else nothing was ready
        reducer, params, scale = self._handed_in
        self._handed_in = None
        with region("communication"):
            work = reducer.start()
            work.wait()
            work.assign()
        if factor != 1:
            multiply_gradients(params.params, factor)
        if scale is not None:
            set_scale(params.params, scale)
        return True

    def cancel(self) -> None:
        """End what an update has begun, as nobody steps; all ranks do."""
        self._handed_in = None

    def plan(self, params: ParameterSet) -> None:
        """Plan what ranks send during backward, after ``finish`` (collective): all can."""

    def drop_plan(self) -> None:
        """Send nothing during backward until there is another plan; all ranks do."""

    def take_flight(self) -> GradientSet | None:
        """Wait for the means under way and remove them; raise what made the exchange fail."""
        try:
            return self.flight()
        finally:
            self.put_flight(None)

    def assign_flight(self) -> bool:
        """Take the flight, and give parameters its means; return whether there was one."""
        means = self.take_flight()
        if means is not None:
            means.assign()
        return means is not None

    def flight(self) -> GradientSet | None:
        """Wait for the means under way and return them; raise what made the exchange fail."""
        raise_if_any(self.error())
        return self._flight

    def put_flight(self, means: GradientSet | None) -> None:
        """Put means in the place of what is under way; ValueError if they are of no use here."""
        if means is not None:
            raise ValueError(
                "the snapshot holds gradients in flight: use double_buffering=True"
            )

    def close(self, signature: tuple[tuple[str, str], ...]) -> None:
        """Wait for what is under way, and free the channel (collective).

        RankMismatchError if the ``signature`` differs between ranks.
        """
        self.error()
        self._communicator.handshake("finalize", signature)
        self.drop_plan()
        channel, self.channel = self.channel, None
        if channel is not None:
            channel.finalize()


def make_channel(communicator: CommunicatorBase, device: Any) -> CommunicatorBase:
    """Return a communicator of the same ranks, for gradients in pieces (collective).

    A thread exchanges gradients on it, beside the training. Those on a GPU, the
    ``device``, travel in the pieces that GPUs want.
    """
    channel = communicator.split(0, communicator.rank)
    if device is not None:
        return channel
    # A class of the user's may lack this setting.
    with contextlib.suppress(KeyError, ValueError):
        if channel.get_config("chunk_bytes") is None:
            channel.set_config("chunk_bytes", PIECE_BYTES)
    return channel
