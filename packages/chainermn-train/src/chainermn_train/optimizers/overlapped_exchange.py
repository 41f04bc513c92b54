"""Gradients that travel while backward computes the others; no step is along old ones.

Ranks plan after a synchronous update: rank 0's order, in which gradients became final, is cut into
buckets. From then on they agree before backward that all send; a thread sends each bucket as soon
as it is final, on a communicator of its own; and they agree after backward that all went well.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, NamedTuple

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase, MeanInProgress, patient_waits

from ..collective_errors import SharedFailure
from ..parameter_set import ParameterSet
from ..profiling import region
from . import tracked_backward
from .background_thread import BackgroundThread, threads_may_use_mpi
from .decision import OPERATION
from .gpus import StreamError, are_on_gpus, device_of, new_stream, using_stream, wait_on_device
from .gradient_exchange import GradientExchange, make_channel
from .gradient_set import Gradient, GradientSet, has_form_of, is_scaled, present_gradient, set_scale

# Long enough that a bucket's costs don't count, short enough that the first one leaves early.
BUCKET_BYTES = 1 << 20
_ALONE = "gradients are exchanged after backward"
_WIRE = "allreduce_grad_dtype"


class _Plan(NamedTuple):
    """What all ranks send in an update: places of parameters by bucket, in order."""

    params: ParameterSet
    buckets: list[list[int]]
    bucket_of: dict[int, int]  # by the parameter's place
    like: list[Any]  # arrays of each parameter's shape and dtype, without memory of that size
    device: Any  # the GPU on which all of this is; None on CPUs
    stream: Any  # of that GPU, for the thread


class _Bucket(NamedTuple):
    """A model for a communicator."""

    named: list[tuple[str, Gradient]]

    def namedparams(self) -> list[tuple[str, Gradient]]:
        return self.named


class _Sending:
    """One update's buckets on their way."""

    def __init__(self, plan: _Plan, mean: MeanInProgress) -> None:
        self.plan, self.mean = plan, mean
        self.final: dict[int, Any] = {}  # by place: the gradients that backward told of
        self._left = list(map(len, plan.buckets))
        self._buckets: list[_Bucket] = []  # handed in

        def reduce(wait_requested: threading.Event) -> None:
            with patient_waits(wait_requested), using_stream(plan.device, plan.stream, wait=False):
                mean.reduce_planned(len(plan.buckets))

        self.thread = BackgroundThread(reduce)

    def tell(self, place: int, grad: Any) -> None:
        """Take a final gradient, and hand in what is complete."""
        if place in self.final or not _fits(grad, self.plan.like[place]):
            return
        self.final[place] = grad
        self._left[self.plan.bucket_of[place]] -= 1
        while len(self._buckets) < len(self._left) and not self._left[len(self._buckets)]:
            self._hand_in()

    def tell_rest(self) -> bool:
        """Hand in all that is left; return whether what has left is what parameters have now."""
        right = True
        for place, param in enumerate(self.plan.params.params):
            grad = present_gradient(param)
            if place in self.final:
                right = right and grad is self.final[place]
            elif grad is not None and _fits(grad, self.plan.like[place]):
                self.final[place] = grad
            elif grad is not None:
                right = False
        while len(self._buckets) < len(self._left):
            self._hand_in()
        return right

    def end(self) -> None:
        """Hand in all that is left, whatever fails meanwhile: other ranks wait for it."""
        while len(self._buckets) < len(self._left):
            with contextlib.suppress(Exception):
                self._hand_in()

    def _hand_in(self) -> None:
        plan = self.plan
        named = plan.params.namedparams()
        bucket = []
        for place in plan.buckets[len(self._buckets)]:
            name, param = named[place]
            bucket.append((name, Gradient(param, self.final.get(place), plan.like[place])))
        self._buckets.append(_Bucket(bucket))
        self.mean.add(self._buckets[-1], planned=True)

    def assign(self) -> None:
        """Give the parameters their means."""
        self.mean.assign()
        for bucket in self._buckets:
            for _, each in bucket.named:
                if each.grad is not None:
                    each.param.grad = each.grad


class OverlappedExchange(GradientExchange):
    """Each update steps along the means of its own gradients, which leave during backward.

    Until there is a plan, and where none can be made, gradients are sent after backward. All ranks
    have the same plan. Once they have agreed to send, each sends all its buckets, without gradients
    where it fails meanwhile.
    """

    def __init__(
        self, communicator: CommunicatorBase, zero_fill: bool, only_on_gpus: bool = False
    ) -> None:
        """Exchange on ``communicator``; not collective.

        With ``only_on_gpus`` gradients in host memory are sent after backward.
        """
        super().__init__(communicator, zero_fill)
        self._only_on_gpus = only_on_gpus
        self._own: CommunicatorBase | None = None
        self._plan: _Plan | None = None
        self._sending: _Sending | None = None
        self._scale: float | None = None  # the loss scale of what is sent
        self._order: list[int] = []  # of places, as this update's gradients became final
        self._is_given_up = not tracked_backward.is_available
        self._is_off: bool | None = None  # not known before it sees the parameters
        self.must_resend = False
        # What has failed on this rank alone: the others learn of it in the next update.
        self._unreported: StreamError | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OverlappedExchange:
        twin = OverlappedExchange(self._communicator, self._zero_fill, self._only_on_gpus)
        twin._is_given_up = self._is_given_up
        memo[id(self)] = twin
        return twin

    @property
    def can_plan(self) -> bool:  # type: ignore[override]
        return len(self._order) > 0

    def can_send(self, params: ParameterSet, loss: Any, scale: float | None) -> bool:
        plan, own = self._plan, self._own
        if plan is None or own is None:
            return False
        if plan.params is not params or _wire_dtype(own) != _wire_dtype(self._communicator):
            self._plan = None  # it is outdated; all make another one
            return False
        return _is_tracked(params, loss) and (scale is not None or not is_scaled(params))

    def backward(self, params: ParameterSet, loss: Any, loss_scale: float | None) -> None:
        self._order = []
        if self._is_off is None:
            self._is_off = self._is_given_up or (self._only_on_gpus and not are_on_gpus(params))
        if self._plan is not None or self._is_off or not _is_tracked(params, loss):
            super().backward(params, loss, loss_scale)
            return
        on_final = lambda place, _: self._order.append(place)  # noqa: E731
        tracked_backward.backward(loss, params.params, on_final, loss_scale)

    def backward_and_send(self, params: ParameterSet, loss: Any, loss_scale: float | None) -> None:
        assert self._plan is not None  # else it can't send
        mean = self._communicator.start_mean(self._zero_fill, OPERATION, self._own)
        self._sending, self._scale = _Sending(self._plan, mean), loss_scale
        tracked_backward.backward(loss, params.params, self._sending.tell, loss_scale)

    def ready(self, params: ParameterSet, scale: float | None) -> MeanInProgress:
        if self._sending is not None:
            with SharedFailure(self._communicator.handshake, OPERATION):
                self.must_resend = not self._sending.tell_rest()
            self._is_given_up = self._is_given_up or self.must_resend
            return self._sending.mean
        mean = super().ready(params, scale)
        if self._order and not (mean.takes_plans and threads_may_use_mpi(_ALONE)):
            self._order, self._is_given_up = [], True
            self._is_off = None
        if self._order and _rounds_by_message(params, self._communicator):
            self._order = []
        return mean

    def finish(self, factor: float = 1.0) -> bool:
        sending, self._sending, self.must_resend = self._sending, None, False
        if sending is None:
            return super().finish(factor)
        with region("communication"):
            error = sending.thread.wait() or _wait_on_device(sending.plan)
        try:
            if error is not None:
                if isinstance(error, StreamError):  # without a traceback's arrays
                    self._unreported = StreamError(str(error))
                raise error
        finally:
            del error  # else a cycle through its traceback would keep the gradients' memory
        sending.assign()
        if self._scale is not None:
            set_scale(sending.plan.params, self._scale)
        return True

    def cancel(self) -> None:
        super().cancel()
        sending, self._sending, self.must_resend = self._sending, None, False
        if sending is not None:
            sending.end()
            error = sending.thread.wait() or _wait_on_device(sending.plan)
            if isinstance(error, StreamError):
                self._unreported = StreamError(str(error))

    def error(self) -> BaseException | None:
        return self._unreported

    def flight(self) -> GradientSet | None:
        if self._unreported is not None:
            raise self._unreported
        return None

    def put_flight(self, means: GradientSet | None) -> None:
        super().put_flight(means)
        self._unreported = None

    def plan(self, params: ParameterSet) -> None:
        with SharedFailure(self._communicator.handshake, OPERATION):
            like = [_without_memory(param.array) for param in params.params]
            device = device_of(params.params[0].array)
            stream = new_stream(device)
        order: list[int] = self._communicator.bcast_obj(self._order)
        self._order = []
        if self._own is None:
            self._own = make_channel(self._communicator, params)
        elif _wire_dtype(self._own) != _wire_dtype(self._communicator):
            self._own.set_config(_WIRE, _wire_dtype(self._communicator))
        rest = set(range(len(like))) - set(order)
        buckets: list[list[int]] = []
        room, dtype = 0, None
        for place in [*order, *sorted(rest)]:
            if like[place].nbytes > room or like[place].dtype != dtype:
                buckets.append([])
                room, dtype = BUCKET_BYTES, like[place].dtype
            buckets[-1].append(place)
            room -= like[place].nbytes
        bucket_of = {place: number for number, each in enumerate(buckets) for place in each}
        self._plan = _Plan(params, buckets, bucket_of, like, device, stream)

    def drop_plan(self) -> None:
        self._plan, self._order, self._is_off = None, [], None

    def close(self) -> None:
        self._plan = None
        if self._own is not None:
            self._own.finalize()
            self._own = None


def _wait_on_device(plan: _Plan) -> StreamError | None:
    try:
        wait_on_device(plan.device, plan.stream)
    except StreamError as error:
        return error
    return None


def _wire_dtype(communicator: CommunicatorBase) -> Any:
    return communicator.get_config(_WIRE)


def _rounds_by_message(params: ParameterSet, communicator: CommunicatorBase) -> bool:
    """Return whether numbers may be rounded as those that travel in the same message ask.

    They are where they become narrower for the wire; a node's sum of 16-bit numbers does. What is
    reproducible is rounded alike in any message.
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


def _without_memory(array: Any) -> Any:
    """Return an array of the same shape and dtype that holds one number."""
    with chainer.using_device(chainer.backend.get_device_from_array(array)):
        module = chainer.backend.get_array_module(array)
        return module.broadcast_to(module.zeros((), array.dtype), array.shape)


def _is_tracked(params: ParameterSet, loss: Any) -> bool:
    """Return whether final gradients can be known: those of plain losses and real floats.

    All parameters are NumPy's arrays, or of one GPU.
    """
    if type(loss) is not chainer.Variable:
        return False
    arrays = [param.array for param in params.params]
    if not {np.ndarray} >= set(map(type, arrays)):
        devices = {device_of(array) for array in arrays}
        if None in devices or len(devices) > 1:
            return False
    return all([array.dtype.kind == "f" for array in arrays])
