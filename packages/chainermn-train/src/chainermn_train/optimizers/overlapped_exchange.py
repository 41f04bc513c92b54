"""Gradients that travel while backward computes the others; no step is along old ones.

Ranks plan after a synchronous update: rank 0's order, in which gradients became final,
is cut into buckets. From then on they agree before backward that all send; a thread
sends each bucket as soon as it is final, on a communicator of its own; and they agree
after backward that all went well.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

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
from .agreement import OPERATION
from .gpus import device_of, new_stream, using_stream, wait_on_device
from .gradient_exchange import GradientExchange, make_channel
from .gradient_set import (
    GradientSet,
    not_updated,
    present_gradient,
)
from .parameter_set import ParameterSet

# Long enough that a bucket's costs don't count, short enough that the first one leaves
# early.
BUCKET_BYTES = 1 << 20
_HOST = "host memory"
_ALONE = "gradients are exchanged after backward"


@dataclass(frozen=True)
class _Plan:
    """What all ranks send in an update; numbers are those of parameters in the set.

    Attributes:
        params: the set.
        forms: those of the parameters' arrays and gradients, see :func:`_form_of`.
        left_out: the ids of parameters that are not updated.
        wire: the communicator's ``allreduce_grad_dtype``.
        buckets: the numbers in each bucket, in the order in which buckets leave.
        device: the GPU on which all of this is; None on CPUs.
        stream: a stream of that GPU, for the thread.
    """

    params: ParameterSet
    forms: list[Any]
    left_out: set[int]
    wire: Any
    buckets: list[list[int]]
    device: Any
    stream: Any

    def holds_for(self, params: ParameterSet, communicator: CommunicatorBase) -> bool:
        """Return whether all is as it was when the plan was made."""
        return (
            self.params is params
            and self.forms == list(map(_form_of, _arrays_of(params)))
            and self.left_out == _ids_left_out(params)
            and self.wire == _wire(communicator)
        )


class _Sending:
    """One update's buckets on their way."""

    def __init__(self, plan: _Plan, reducer: Reducer, scale: float | None) -> None:
        self.plan = plan
        self.reducer = reducer
        # Gradients that have left, or will.
        self.gradients = GradientSet.empty(plan.params, scale)
        self.works: list[Work] = []  # of the buckets that were handed to the reducer
        self.must_resend = False
        self._queue: SimpleQueue[Work] = SimpleQueue()
        self._num_missing = [len(bucket) for bucket in plan.buckets]
        self._bucket_of = {
            number: position
            for position, bucket in enumerate(plan.buckets)
            for number in bucket
        }
        self.thread = BackgroundThread(self._reduce)

    def _reduce(self, wait_requested: threading.Event) -> None:
        stream = using_stream(self.plan.device, self.plan.stream, wait=False)
        with patient_waits(wait_requested), stream:
            for _ in self.plan.buckets:
                self._queue.get().wait()

    def add(self, number: int, grad: Any) -> None:
        """Add a final gradient, and send the buckets that are complete."""
        position = self._bucket_of.get(number)
        if position is None or not self._keep(number, grad):
            return
        self._num_missing[position] -= 1
        while self._has_unsent and not self._num_missing[len(self.works)]:
            self._send_next()

    def add_rest(self) -> None:
        """Send all that is left; see whether what has left is what parameters have now."""
        for number, own in enumerate(self.gradients.gradients):
            grad = present_gradient(own.param)
            if grad is not None and number in self._bucket_of:
                self._keep(number, grad)
            if own.grad is not grad:
                self.must_resend = True
        while self._has_unsent:
            self._send_next()

    def end(self) -> None:
        """Send zeros for all that is left, as nobody steps: other ranks wait for it."""
        while self._has_unsent:
            for number in self.plan.buckets[len(self.works)]:
                self.gradients.gradients[number].grad = None
            self._send_next()
        self.thread.wait()

    @property
    def _has_unsent(self) -> bool:
        return len(self.works) < len(self.plan.buckets)

    def _keep(self, number: int, grad: Any) -> bool:
        """Keep a gradient if it is the first one of its parameter, and as planned."""
        own = self.gradients.gradients[number]
        if own.grad is not None or _form_of(grad) != self.plan.forms[number]:
            return False
        own.grad = grad
        return True

    def _send_next(self) -> None:
        numbers = self.plan.buckets[len(self.works)]
        bucket = [self.gradients.gradients[number] for number in numbers]
        work = self.reducer.add_planned(GradientSet(bucket, None))
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
        # Numbers of parameters, as this update's gradients became final.
        self._order: list[int] = []
        self._is_given_up = False

    def __deepcopy__(self, memo: dict[int, Any]) -> OverlappedExchange:
        twin: OverlappedExchange = super().__deepcopy__(memo)
        twin._only_on_gpus = self._only_on_gpus
        return twin

    @property
    def can_plan(self) -> bool:  # type: ignore[override]
        return len(self._order) > 0

    @property
    def must_resend(self) -> bool:  # type: ignore[override]
        return self._sending is not None and self._sending.must_resend

    def can_send(self, params: ParameterSet, loss: Any, scale: float | None) -> bool:
        if self._plan and not self._plan.holds_for(params, self._communicator):
            self._plan = None  # it is outdated; all make another one
        return self._plan is not None and type(loss) is chainer.Variable

    def backward(self, params: ParameterSet, loss: Any, scale: float | None) -> None:
        self._order = []
        if self._plan is None and self._can_track(params, loss):
            tracked_backward.backward(loss, params.params, self._note, scale)
        else:
            super().backward(params, loss, scale)

    def _note(self, number: int, _: Any) -> None:
        self._order.append(number)

    def backward_and_send(
        self, params: ParameterSet, loss: Any, scale: float | None
    ) -> None:
        assert self._plan is not None  # else it can't send
        reducer = self._communicator.make_reducer(
            self._zero_fill, OPERATION, self.channel
        )
        self._sending = _Sending(self._plan, reducer, scale)
        self._sending.thread.start()
        tracked_backward.backward(loss, params.params, self._sending.add, scale)

    def ready(self, params: ParameterSet, scale: float | None) -> Reducer:
        if self._sending is not None:
            with raise_together(self._communicator.handshake, OPERATION, meet=False):
                self._sending.add_rest()
            self._is_given_up = self._is_given_up or self.must_resend
            return self._sending.reducer
        return super().ready(params, scale)

    def finish(
        self, params: ParameterSet, scale: float | None, factor: float = 1.0
    ) -> bool:
        sending = self._sending
        self._sending = None
        if sending is None:
            return super().finish(params, scale, factor)
        with region("communication"):
            raise_if_any(sending.thread.wait())
        wait_on_device(sending.plan.device, sending.plan.stream)
        for work in sending.works:
            work.assign()
        sending.gradients.assign()
        return True

    def cancel(self) -> None:
        super().cancel()
        sending = self._sending
        self._sending = None
        if sending is not None:
            sending.end()
            with contextlib.suppress(CommunicationError):  # the job is about to end
                wait_on_device(sending.plan.device, sending.plan.stream)
            for work in sending.works:
                work.leave_background()

    def _can_track(self, params: ParameterSet, loss: Any) -> bool:
        """Return whether final gradients can be known, and sent with the bits of a later sum.

        They can be known for plain losses, and parameters that are real floats, all
        NumPy's or of one GPU.
        """
        if self._is_given_up or type(loss) is not chainer.Variable:
            return False
        arrays = _arrays_of(params)
        memories = {_memory_of(array) for array in arrays}
        if len(memories) != 1 or None in memories:
            return False
        if self._only_on_gpus and _HOST in memories:
            return False
        takes_plans = self._communicator.make_reducer().takes_plans
        if not takes_plans or not threads_may_use_mpi(_ALONE):
            self._is_given_up = True
            return False
        is_float = all([array.dtype.kind == "f" for array in arrays])
        return is_float and not _rounds_by_message(arrays, self._communicator)

    def plan(self, params: ParameterSet) -> None:
        arrays = _arrays_of(params)
        with raise_together(self._communicator.handshake, OPERATION, meet=False):
            device = device_of(arrays[0])
            stream = new_stream(device)
        left_out = _ids_left_out(params)
        order = [
            number
            for number in dict.fromkeys([*self._order, *range(len(arrays))])
            if id(params.params[number]) not in left_out
        ]
        self._order = []
        order = self._communicator.bcast_obj(order)  # rank 0's, as all plan alike
        if self.channel is None:
            self.channel = make_channel(self._communicator, device)
        self._plan = _Plan(
            params=params,
            forms=list(map(_form_of, arrays)),
            left_out=left_out,
            wire=_wire(self._communicator),
            buckets=_buckets_of(order, arrays),
            device=device,
            stream=stream,
        )

    def drop_plan(self) -> None:
        self._plan = None
        self._order = []


def _buckets_of(order: list[int], arrays: list[Any]) -> list[list[int]]:
    """Cut an order of parameters into buckets of one dtype each."""
    buckets: list[list[int]] = []
    room = 0
    dtype = None
    for number in order:
        array = arrays[number]
        if array.nbytes > room or array.dtype != dtype:
            buckets.append([])
            room = BUCKET_BYTES
            dtype = array.dtype
        buckets[-1].append(number)
        room -= array.nbytes
    return buckets


def _arrays_of(params: ParameterSet) -> list[Any]:
    return [param.array for param in params.params]


def _form_of(array: Any) -> tuple[type, Any, tuple[int, ...]]:
    return type(array), array.dtype, array.shape


def _ids_left_out(params: ParameterSet) -> set[int]:
    return {id(param) for param in not_updated(params)}


def _wire(communicator: CommunicatorBase) -> Any:
    return communicator.get_config("allreduce_grad_dtype")


def _rounds_by_message(arrays: list[Any], communicator: CommunicatorBase) -> bool:
    """Return whether numbers may be rounded as those that travel in the same message ask.

    They are where they become narrower for the wire; a node's sum of 16-bit numbers
    does. What is reproducible is rounded alike in any message.
    """
    if communicator.get_config("reproducible"):
        return False
    widths = [array.dtype.itemsize for array in arrays]
    if min(widths) < 4 and 1 < communicator.inter_size < communicator.size:
        return True
    wire = _wire(communicator)
    return wire is not None and max(widths) > wire.itemsize


def _memory_of(array: Any) -> Any:
    """Return the GPU that holds an array, _HOST, or None."""
    return _HOST if type(array) is np.ndarray else device_of(array)
