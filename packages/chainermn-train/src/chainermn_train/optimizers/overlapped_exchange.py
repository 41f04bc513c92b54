"""Gradients that travel while backward computes the others; no step is along old ones.

Ranks plan after a synchronous update: rank 0's order, in which gradients became final,
is cut into buckets. From then on they agree before backward that all send; a thread
sends each bucket as soon as it is final, on a communicator of its own; and they agree
after backward that all went well.
"""

from __future__ import annotations

import contextlib
import threading
from queue import SimpleQueue
from typing import Any, NamedTuple

import chainer
import numpy as np

from chainermn_comm import (
    CommunicationError,
    CommunicatorBase,
    Reducer,
    Work,
    patient_waits,
)

from ..background_thread import BackgroundThread, raise_if_any, threads_may_use_mpi
from ..collective_errors import raise_together
from ..profiling import region
from . import tracked_backward
from .decision import OPERATION
from .gpus import device_of, new_stream, using_stream, wait_on_device
from .gradient_exchange import GradientExchange, make_channel
from .gradient_set import (
    GradientSet,
    are_scaled_by,
    has_form_of,
    not_updated,
    present_gradient,
)
from .parameter_set import ParameterSet

# Long enough that a bucket's costs don't count, short enough that the first one leaves
# early.
BUCKET_BYTES = 1 << 20
_HOST = "host memory"
_ALONE = "gradients are exchanged after backward"
_WIRE = "allreduce_grad_dtype"


class _Plan(NamedTuple):
    """What all ranks send in an update: places of parameters by bucket, in order."""

    params: ParameterSet
    buckets: list[list[int]]
    bucket_of: dict[int, int]  # by the parameter's place
    left_out: set[int]  # ids of the parameters that are not updated
    # Arrays of each parameter's shape and dtype, without memory of that size.
    like: list[Any]
    device: Any  # the GPU on which all of this is; None on CPUs
    stream: Any  # of that GPU, for the thread


class _Sending:
    """One update's buckets on their way."""

    def __init__(self, plan: _Plan, reducer: Reducer, scale: float | None) -> None:
        self.plan, self.reducer = plan, reducer
        self.works: list[Work] = []  # of the buckets that were handed in
        self._queue: SimpleQueue[Work] = SimpleQueue()
        # That backward has passed on.
        self.gradients = GradientSet.empty(plan.params, scale)
        for each, like in zip(self.gradients.gradients, plan.like, strict=True):
            each.like = like
        self._left = list(map(len, plan.buckets))
        self._handed_in = 0  # buckets
        self.must_resend = False

        def reduce(wait_requested: threading.Event) -> None:
            with (
                patient_waits(wait_requested),
                using_stream(plan.device, plan.stream, wait=False),
            ):
                for _ in plan.buckets:
                    self._queue.get().wait()

        self.thread = BackgroundThread(reduce)

    def take(self, place: int, grad: Any) -> None:
        """Take a final gradient, and hand in what is complete."""
        own = self.gradients.gradients[place]
        is_planned = place in self.plan.bucket_of
        if own.grad is not None or not is_planned or not _fits(grad, own.like):
            return
        own.grad = grad
        self._left[self.plan.bucket_of[place]] -= 1
        while self._handed_in < len(self._left) and not self._left[self._handed_in]:
            self._hand_in()

    def take_rest(self) -> None:
        """Hand in all that is left; see whether what has left is what parameters have now."""
        for place, own in enumerate(self.gradients.gradients):
            grad = present_gradient(own.param)
            is_late = own.grad is None and place in self.plan.bucket_of
            if is_late and grad is not None and _fits(grad, own.like):
                own.grad = grad
            self.must_resend |= own.grad is not grad
        while self._handed_in < len(self._left):
            self._hand_in()

    def end(self) -> None:
        """Hand in all that is left, whatever fails meanwhile: other ranks wait for it."""
        while self._handed_in < len(self._left):
            try:
                self._hand_in()
            except Exception:  # zeros in their place: nobody steps
                for place in self.plan.buckets[self._handed_in]:
                    self.gradients.gradients[place].grad = None
                self._hand_in()
        self.thread.wait()

    def _hand_in(self) -> None:
        places = self.plan.buckets[self._handed_in]
        bucket = GradientSet(
            [self.gradients.gradients[place] for place in places], None
        )
        work = self.reducer.add_planned(bucket)
        self._handed_in += 1  # else it is still to come, also where that fails
        self.works.append(work)
        self._queue.put(work)


class OverlappedExchange(GradientExchange):
    """Each update steps along the means of its own gradients, which leave during backward.

    Until there is a plan, and where none can be made, gradients are sent after
    backward. All ranks have the same plan. Once they have agreed to send, each sends
    all its buckets, without gradients where it fails meanwhile.
    """

    def __init__(
        self,
        communicator: CommunicatorBase,
        zero_fill: bool,
        only_on_gpus: bool = False,
    ) -> None:
        """Exchange on ``communicator``; not collective.

        With ``only_on_gpus`` gradients in host memory are sent after backward.
        """
        super().__init__(communicator, zero_fill)
        self._only_on_gpus = only_on_gpus
        self._plan: _Plan | None = None
        self._sending: _Sending | None = None
        # Of places, as this update's gradients became final.
        self._order: list[int] = []
        self._is_given_up = False

    def __deepcopy__(self, memo: dict[int, Any]) -> OverlappedExchange:
        twin = OverlappedExchange(
            self._communicator, self._zero_fill, self._only_on_gpus
        )
        twin._is_given_up = self._is_given_up
        return twin

    @property
    def can_plan(self) -> bool:  # type: ignore[override]
        return len(self._order) > 0

    @property
    def must_resend(self) -> bool:  # type: ignore[override]
        return self._sending is not None and self._sending.must_resend

    def can_send(self, params: ParameterSet, loss: Any, scale: float | None) -> bool:
        plan, own = self._plan, self.channel
        if plan is None or own is None:
            return False
        left_out = set(map(id, not_updated(params)))
        is_of_these = plan.params is params and plan.left_out == left_out
        if not is_of_these or _wire_dtype(own) != _wire_dtype(self._communicator):
            self._plan = None  # it is outdated; all make another one
            return False
        return self._is_tracked(params, loss) and (
            scale is not None or are_scaled_by(params, None)
        )

    def backward(
        self, params: ParameterSet, loss: Any, loss_scale: float | None
    ) -> None:
        self._order = []
        if (
            self._plan is not None
            or self._is_given_up
            or not self._is_tracked(params, loss)
        ):
            super().backward(params, loss, loss_scale)
            return
        note = lambda place, _: self._order.append(place)  # noqa: E731
        tracked_backward.backward(loss, params.params, note, loss_scale)

    def backward_and_send(
        self, params: ParameterSet, loss: Any, loss_scale: float | None
    ) -> None:
        assert self._plan is not None  # else it can't send
        reducer = self._communicator.make_reducer(
            self._zero_fill, OPERATION, self.channel
        )
        self._sending = _Sending(self._plan, reducer, loss_scale)
        self._sending.thread.start()
        tracked_backward.backward(loss, params.params, self._sending.take, loss_scale)

    def ready(self, params: ParameterSet, scale: float | None) -> Reducer:
        if self._sending is not None:
            with raise_together(self._communicator.handshake, OPERATION, meet=False):
                self._sending.take_rest()
            self._is_given_up = self._is_given_up or self.must_resend
            return self._sending.reducer
        reducer = super().ready(params, scale)
        if self._order and not (reducer.takes_plans and threads_may_use_mpi(_ALONE)):
            self._order, self._is_given_up = [], True
        if self._order and _rounds_by_message(params, self._communicator):
            self._order = []
        return reducer

    def finish(self, factor: float = 1.0) -> bool:
        sending, self._sending = self._sending, None
        if sending is None:
            return super().finish(factor)
        with region("communication"):
            raise_if_any(sending.thread.wait())
        wait_on_device(sending.plan.device, sending.plan.stream)
        for work in sending.works:
            work.assign()
        sending.gradients.assign()
        return True

    def cancel(self) -> None:
        super().cancel()
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.end()
            with contextlib.suppress(CommunicationError):  # the job is about to end
                wait_on_device(sending.plan.device, sending.plan.stream)
            for work in sending.works:
                work.leave_background()

    def _is_tracked(self, params: ParameterSet, loss: Any) -> bool:
        """Return whether final gradients can be known: those of plain losses and real floats.

        All parameters are NumPy's arrays, or of one GPU.
        """
        arrays = [param.array for param in params.params]
        places = set(map(_place_of, arrays))
        if type(loss) is not chainer.Variable or None in places or len(places) != 1:
            return False
        if self._only_on_gpus and _HOST in places:
            return False
        return all([array.dtype.kind == "f" for array in arrays])

    def plan(self, params: ParameterSet) -> None:
        with raise_together(self._communicator.handshake, OPERATION, meet=False):
            like = [_without_memory(param.array) for param in params.params]
            device = device_of(params.params[0].array)
            stream = new_stream(device)
        left_out = set(map(id, not_updated(params)))
        places = [
            place
            for place, param in enumerate(params.params)
            if id(param) not in left_out
        ]
        # Rank 0's, as all plan alike.
        order, places = self._communicator.bcast_obj((self._order, places))
        self._order = []
        if self.channel is None:
            self.channel = make_channel(self._communicator, device)
        elif _wire_dtype(self.channel) != _wire_dtype(self._communicator):
            self.channel.set_config(_WIRE, _wire_dtype(self._communicator))
        first = [place for place in order if place in set(places)]
        buckets: list[list[int]] = []
        room, dtype = 0, None
        for place in dict.fromkeys([*first, *places]):
            if like[place].nbytes > room or like[place].dtype != dtype:
                buckets.append([])
                room, dtype = BUCKET_BYTES, like[place].dtype
            buckets[-1].append(place)
            room -= like[place].nbytes
        bucket_of = {
            place: number for number, each in enumerate(buckets) for place in each
        }
        self._plan = _Plan(params, buckets, bucket_of, left_out, like, device, stream)

    def drop_plan(self) -> None:
        self._plan, self._order = None, []


def _wire_dtype(communicator: CommunicatorBase) -> Any:
    return communicator.get_config(_WIRE)


def _rounds_by_message(params: ParameterSet, communicator: CommunicatorBase) -> bool:
    """Return whether numbers may be rounded as those that travel in the same message ask.

    They are where they become narrower for the wire; a node's sum of 16-bit numbers
    does. What is reproducible is rounded alike in any message.
    """
    if communicator.get_config("reproducible"):
        return False
    widths = [param.array.dtype.itemsize for param in params.params]
    wire, nodes = _wire_dtype(communicator), communicator.inter_size
    if min(widths, default=4) < 4 and 1 < nodes < communicator.size:
        return True
    return wire is not None and max(widths, default=0) > wire.itemsize


def _fits(grad: Any, like: Any) -> bool:
    return type(grad) is type(like) and has_form_of(grad, like)


def _place_of(array: Any) -> Any:
    """Return the GPU that holds an array, _HOST, or None."""
    return _HOST if type(array) is np.ndarray else device_of(array)


def _without_memory(array: Any) -> Any:
    """Return an array of the same shape and dtype that holds one number."""
    with chainer.using_device(chainer.backend.get_device_from_array(array)):
        module = chainer.backend.get_array_module(array)
        return module.broadcast_to(module.zeros((), array.dtype), array.shape)
