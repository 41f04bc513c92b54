"""How the gradients of one optimizer's parameters become means over ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chainermn_comm import CommunicatorBase, Reducer

from ...background_thread import BackgroundThread, raise_if_any
from ...profiling import region
from ..agreement import OPERATION
from ..block_updates import step_in_blocks
from ..gradient_set import GradientSet, multiply_gradients, set_scale
from ..parameter_set import ParameterSet

# Four chunks are under way at a time: a link of 1 Gbit/s stays busy between two looks of
# a thread that seldom has the interpreter, and the training's small messages wait 4 ms
# at most behind these chunks. See docs/decisions/updates.md.
CHUNK_BYTES = 125 << 10


class GradientExchange:
    """The synchronous exchange of one optimizer's gradients; other kinds are subclasses.

    An update calls :meth:`backward`, which computes gradients, and :meth:`reducer_of`,
    by whose result ranks agree. Then :meth:`finish` gives means to the parameters, or
    :meth:`cancel` ends the exchange if nobody steps.
    """

    #: Whether backward has shown this rank in which order gradients become final.
    can_plan = False
    #: Whether the user has changed parameters of this rank since the last step, if the
    #: exchange needs to know.
    has_changed = False
    #: Whether only some ranks may have stepped if a step has raised, as in a hook.
    may_have_stepped = True

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        """Exchange on ``communicator``; not collective."""
        self._communicator = communicator
        self._zero_fill = zero_fill
        # The thread's communicator, since the training uses the optimizer's communicator
        # meanwhile. Either all ranks have a channel or none has.
        self.channel: CommunicatorBase | None = None
        self._reducer: Any = None  # the `Reducer` that `reducer_of` has returned
        # Gradients that no step has used yet. They are means once the thread has ended.
        self.pending: GradientSet | None = None
        self._thread: BackgroundThread | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.failure()  # pending gradients are means then, or dropped
        twin = copy.copy(self)
        twin.channel = None
        twin.pending = copy.deepcopy(self.pending, memo)
        twin._thread = None
        return twin

    def can_send(self, params: ParameterSet, loss: Any) -> bool:
        """Return whether there is a plan by which this loss's gradients leave during backward."""
        return False

    def backward(
        self, params: ParameterSet, loss: Any, scale: float | None, sends: bool = False
    ) -> None:
        """Compute gradients; with ``sends``, the same on all ranks, send them during backward."""
        loss.backward(loss_scale=scale)

    def make_reducer(self) -> Reducer:
        """Return a reducer, by which ranks agree if this one has no gradients."""
        return self._communicator.make_reducer(self._zero_fill, OPERATION)

    def reducer_of(self, params: ParameterSet, scale: float | None) -> Reducer:
        """Return a reducer of the present gradients, which are final and have this loss scale."""
        reducer = self.make_reducer()
        # A communicator with its own method for the mean gets the model, and may look
        # at all of it.
        bucket = params
        if not reducer.takes_plans:
            bucket = params.target
        reducer.add(bucket)
        self._reducer = reducer
        return reducer

    def finish(self, params: ParameterSet, scale: float | None, factor: float) -> bool:
        """Take the means of these gradients (collective, after ranks have agreed by the reducer).

        Means are multiplied by ``factor``, the same on all ranks. Return whether the
        parameters' gradients are now means for a step, perhaps of the update before.
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

    def step(self, optimizer: Any, params: ParameterSet) -> None:
        """Let the optimizer step along the parameters' gradients."""
        step_in_blocks(optimizer, params.params)

    def cancel(self) -> None:
        """End an exchange that has begun, on all ranks: none steps."""
        self._reducer = None

    def plan(self, params: ParameterSet) -> None:
        """Plan the sending during backward (collective, after ``finish``, if all ranks can)."""

    def failure(self) -> BaseException | None:
        """Wait until pending gradients are means; if that fails, drop them and return the error."""
        if self._thread is None:
            return None
        with region("communication"):
            error = self._thread.wait()
        if error is not None:
            self.pending = None
        return error

    def wait(self) -> None:
        """Wait until pending gradients are means; raise the error of their exchange, once."""
        try:
            raise_if_any(self.failure())
        finally:
            self._thread = None

    def drop(self) -> None:
        """Drop pending gradients and plans, since the parameters have another state."""
        self.failure()  # an error of the exchange has no effect any more
        self.pending = None
        self._thread = None

    def load_pending(self, serializer: Any, target: Any) -> None:
        """Load saved means as pending gradients; ValueError if no step would use them."""
        raise ValueError(
            "the snapshot holds gradients in flight: use double_buffering=True"
        )

    def serialize(self, serializer: Any, target: Any) -> None:
        """Save or load what is kept from one step to the next, besides pending gradients."""

    def error_norm(self) -> float:
        """Return the norm of what gradients have lost on this rank, and will get back later."""
        return 0.0

    def assign_pending(self) -> bool:
        """Wait, and give parameters the pending means; return whether there were any."""
        self.wait()
        means = self.pending
        self.pending = None
        if means is None:
            return False
        means.assign()
        return True

    # Of an exchange whose ranks step parts of the parameters alone.

    #: Whether it is such a one.
    is_sharded = False

    def forget_states(self) -> None:
        """Forget the state of this rank's parts, since the optimizer has another state."""

    def gather_states(self, optimizer: Any) -> None:
        """Give update rules without state that of all ranks' parts (collective)."""

    def refuse_parts(self) -> None:
        """Raise RuntimeError if update rules lack a state of which this rank has parts."""

    @contextmanager
    def whole_states(self, optimizer: Any) -> Iterator[None]:
        """Let update rules have whole states in the block (collective)."""
        yield

    def close(self, signature: tuple[tuple[str, str], ...]) -> None:
        """Wait for the thread, and free the channel (collective).

        RankMismatchError if the ``signature`` differs between ranks.
        """
        self.failure()
        self._communicator.handshake("finalize", signature)
        if self.channel is not None:
            self.channel.finalize()
        self.channel = None


def make_channel(communicator: CommunicatorBase, device: Any) -> CommunicatorBase:
    """Return a communicator of the same ranks, for gradients in chunks (collective).

    A thread exchanges gradients on this channel during training. Gradients on a GPU, the
    ``device``, travel in chunks of the default size.
    """
    channel = communicator.split(0, communicator.rank)
    settings = channel.get_config()  # a class of the user's own may have none
    if device is None and settings.get("chunk_bytes", CHUNK_BYTES) is None:
        channel.set_config("chunk_bytes", CHUNK_BYTES)
    return channel
