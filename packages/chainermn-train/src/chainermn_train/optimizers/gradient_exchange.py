"""How the gradients of one optimizer's parameters become means over ranks."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from chainermn_comm import CommunicatorBase, Reducer

from ..background_thread import BackgroundThread, raise_if_any
from ..profiling import region
from .agreement import OPERATION
from .gradient_set import GradientSet, multiply_gradients, set_scale
from .parameter_set import ParameterSet

# Four times as much is under way: a link of 1 Gbit/s stays busy between two looks of a
# thread that seldom has the interpreter, and other small messages wait 4 ms behind it at
# most. See docs/decisions/double_buffering.md.
PIECE_BYTES = 125 << 10


class GradientExchange:
    """The exchange of one optimizer, which an update waits for; other kinds are subclasses.

    An update computes gradients (:meth:`backward`) and gets a reducer for them
    (:meth:`ready`), by which ranks agree. Then :meth:`finish` gives means to the
    parameters; if nobody steps, :meth:`cancel` ends the exchange.
    """

    #: Whether what was sent during backward is not what parameters have now.
    must_resend = False
    #: Whether this update's backward showed what ranks need to plan what they send in the next.
    can_plan = False
    #: Whether a step may use gradients of an update before.
    is_delayed = False

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        """Exchange on ``communicator``; not collective."""
        self._communicator = communicator
        self._zero_fill = zero_fill
        # For another thread, while the training uses the communicator; all ranks have
        # it, or none.
        self.channel: CommunicatorBase | None = None
        self._reducer: Any = None  # the `Reducer` that `ready` has returned
        # Gradients that no step has used yet: under way by the thread, or means already.
        self.pending: GradientSet | None = None
        self._thread: BackgroundThread | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        error = self.failure()
        twin = copy.copy(self)
        twin.channel = None
        twin.pending = None
        twin._thread = None
        if error is None:
            twin.pending = copy.deepcopy(self.pending, memo)
        return twin

    def can_send(self, params: ParameterSet, loss: Any) -> bool:
        """Return whether the gradients of this loss can leave during backward, as planned."""
        return False

    def backward(
        self, params: ParameterSet, loss: Any, scale: float | None, sends: bool = False
    ) -> None:
        """Compute gradients, which leave meanwhile if it ``sends``: all ranks do then."""
        loss.backward(loss_scale=scale)

    def ready(self, params: ParameterSet, scale: float | None) -> Reducer:
        """Return a reducer of the present gradients, which are final and have this loss scale."""
        reducer = self._communicator.make_reducer(self._zero_fill, OPERATION)
        # A communicator with its own method for the mean gets the model, and may look
        # at all of it.
        bucket = params
        if not reducer.takes_plans:
            bucket = params.target
        reducer.add(bucket)
        self._reducer = reducer
        return reducer

    def finish(
        self, params: ParameterSet, scale: float | None, factor: float = 1.0
    ) -> bool:
        """Take the means of what was ready (collective, after ranks have agreed by the reducer).

        They are multiplied by ``factor``, the same on all ranks. Return whether the
        parameters' gradients are means to step along, perhaps of an update before.
        """
        with region("communication"):
            work = self._reducer.start()
            self._reducer = None
            work.wait()
            work.assign()
        if factor != 1:
            multiply_gradients(params.params, factor)
        if scale is not None:
            set_scale(params.params, scale)
        return True

    def cancel(self) -> None:
        """End what an update has begun, as nobody steps; all ranks do."""
        self._reducer = None

    def plan(self, params: ParameterSet) -> None:
        """Plan what ranks send during backward, after ``finish`` (collective): all can."""

    def drop_plan(self) -> None:
        """Send nothing during backward until there is another plan; all ranks do."""

    def failure(self) -> BaseException | None:
        """Wait until pending gradients are means; return what failed, if anything."""
        if self._thread is None:
            return None
        with region("communication"):
            return self._thread.wait()

    def wait(self) -> None:
        """Wait until pending gradients are means; drop them and raise what failed, if anything."""
        error = self.failure()
        self._thread = None
        if error is not None:
            self.pending = None
        raise_if_any(error)

    def set_pending(self, means: GradientSet | None) -> None:
        """Let these means be pending instead; ValueError if they are of no use here."""
        if means is not None and not self.is_delayed:
            raise ValueError(
                "the snapshot holds gradients in flight: use double_buffering=True"
            )
        self.failure()  # which makes no difference any more
        self.pending = means
        self._thread = None

    def apply_pending(self) -> bool:
        """Give parameters the pending means, after :meth:`wait`; return whether there were any."""
        self.wait()
        means = self.pending
        self.pending = None
        if means is None:
            return False
        means.assign()
        return True

    def close(self, signature: tuple[tuple[str, str], ...]) -> None:
        """Wait for what is under way, and free the channel (collective).

        RankMismatchError if the ``signature`` differs between ranks.
        """
        self.failure()
        self._communicator.handshake("finalize", signature)
        self.drop_plan()
        channel = self.channel
        self.channel = None
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
