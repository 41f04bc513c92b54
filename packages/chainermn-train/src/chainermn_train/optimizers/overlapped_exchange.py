"""Gradients that travel while backward computes the others; no step is along old ones.

Ranks plan after a synchronous update: rank 0's order, in which gradients became final, is cut into
buckets. From then on a thread sends each bucket as soon as it is final, on a communicator of its
own, and ranks agree once, after backward.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase, MeanInProgress, patient_waits

from ..collective_errors import SharedFailure
from ..profiling import region
from . import tracked_backward
from .agreement import OPERATION
from .background_thread import BackgroundThread, threads_may_use_mpi
from .detached_gradients import DetachedGradient, DetachedGradients, multiply_gradients
from .gpus import StreamError, device_of, new_stream, using_stream, wait_on_device
from .own_channel import make_channel
from .parameter_set import ParameterSet
from .synchronous_exchange import SynchronousExchange

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


@dataclass(eq=False)
class _PlannedGradient(DetachedGradient):
    """A gradient that travels with the shape and dtype that were planned, whatever has changed."""

    like: Any = None

    @property
    def data(self) -> Any:
        return self.like


class _Sending:
    """One update's buckets on their way."""

    def __init__(self, plan: _Plan, mean: MeanInProgress) -> None:
        self.plan, self.mean = plan, mean
        self.final: dict[int, Any] = {}  # by place: the gradients that backward told of
        self._left = list(map(len, plan.buckets))
        self._gradients: list[DetachedGradients] = []  # handed in

        def reduce(wait_requested: threading.Event) -> None:
            with patient_waits(wait_requested), using_stream(plan.device, plan.stream, wait=False):
                mean.reduce_planned(len(plan.buckets))

        self.thread = BackgroundThread(reduce)

    def tell(self, place: int, grad: Any) -> None:
        """Take a final gradient, and hand in what is complete."""
        if place in self.final or not _is_like(grad, self.plan.like[place]):
            return
        self.final[place] = grad
        self._left[self.plan.bucket_of[place]] -= 1
        while len(self._gradients) < len(self._left) and not self._left[len(self._gradients)]:
            self._hand_in()

    def tell_rest(self, with_gradients: bool) -> bool:
        """Hand in all that is left; return whether what has left is what parameters have now."""
        right = True
        for place, param in enumerate(self.plan.params.params):
            grad = param.grad if with_gradients and param.is_initialized else None
            if place in self.final:
                right = right and grad is self.final[place]
            elif grad is not None and _is_like(grad, self.plan.like[place]):
                self.final[place] = grad
            elif grad is not None:
                right = False
        while len(self._gradients) < len(self._left):
            self._hand_in()
        return right

    def end(self) -> None:
        """Hand in all that is left, whatever fails meanwhile: other ranks wait for it."""
        while len(self._gradients) < len(self._left):
            with contextlib.suppress(Exception):
                self._hand_in()

    def _hand_in(self) -> None:
        plan = self.plan
        named = plan.params.namedparams()
        entries: list[DetachedGradient] = [
            _PlannedGradient(*named[place], self.final.get(place), None, plan.like[place])
            for place in plan.buckets[len(self._gradients)]
        ]
        self._gradients.append(DetachedGradients(entries))
        self.mean.add(self._gradients[-1], planned=True)

    def assign(self) -> None:
        """Give the parameters their means."""
        self.mean.assign()
        for gradients in self._gradients:
            for each in gradients.entries:
                if each.grad is not None:
                    each.param.grad = each.grad


class OverlappedExchange(SynchronousExchange):
    """Each update steps along the means of its own gradients, which leave during backward.

    Until there is a plan, and where none can be made, it is a :class:`SynchronousExchange`.

    A rank with a plan sends all its buckets once in each update, without gradients where it fails,
    and drops the plan then. Whatever ranks call meanwhile, they have sent equally often when none
    has a plan any more: one that was elsewhere does so when it learns that others have none.
    """

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        super().__init__(communicator, zero_fill)
        self._own: CommunicatorBase | None = None
        self._plan: _Plan | None = None
        self._sending: _Sending | None = None
        # It sends what nobody waits for, until other ranks have sent as much.
        self._left_alone: BackgroundThread | None = None
        self._order: list[int] = []  # of places, as this update's gradients became final
        self._is_given_up = not tracked_backward.is_available
        self.must_redo = False
        # What has failed on this rank alone: the others are told in the next update.
        self._untold: StreamError | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OverlappedExchange:
        twin = memo[id(self)] = OverlappedExchange(self._communicator, self._zero_fill)
        twin._is_given_up = self._is_given_up
        return twin

    @property
    def is_planned(self) -> bool:  # type: ignore[override]
        return self._plan is not None

    @property
    def can_plan(self) -> bool:  # type: ignore[override]
        return len(self._order) > 0

    def begin(self) -> None:
        self._order, self.must_redo = [], False

    def backward(self, params: ParameterSet, loss: Any, loss_scale: float | None) -> None:
        is_tracked = type(loss) is chainer.Variable and _is_plain(params)
        if self._is_given_up or not is_tracked or self._is_outdated(params):
            super().backward(params, loss, loss_scale)
            return
        on_final = lambda place, _: self._order.append(place)  # noqa: E731
        if self._plan is not None:
            on_final = self._start(self._plan).tell
        tracked_backward.backward(loss, params.params, on_final, loss_scale)

    def ready(self, params: ParameterSet) -> MeanInProgress:
        if self._plan is None:
            mean = super().ready(params)
            if self._order and not (mean.takes_plans and threads_may_use_mpi(_ALONE)):
                self._order, self._is_given_up = [], True
            if self._order and _rounds_by_message(params, self._communicator):
                self._order = []
            return mean
        is_outdated = self._is_outdated(params)
        sending = self._sending or self._start(self._plan)
        with SharedFailure(self._communicator.handshake, OPERATION):
            is_right = sending.tell_rest(with_gradients=not is_outdated)
        self.must_redo = is_outdated or not is_right
        self._is_given_up = self._is_given_up or not (is_outdated or is_right)
        return sending.mean

    def finish(self, factor: float = 1.0) -> bool:
        if self._sending is None:
            return super().finish(factor)
        sending, params = self._sending, self._sending.plan.params.params
        self._wait()
        sending.assign()
        if factor != 1:
            multiply_gradients(params, factor)
        return True

    def discard(self) -> None:
        super().discard()
        if self._plan is not None:
            sending = self._sending or self._start(self._plan)
            sending.end()
            # Other ranks may not update now.
            self._left_alone = sending.thread
            sending.thread.is_left_alone = True
        self._plan = self._sending = None

    def redo(self) -> None:
        with contextlib.suppress(StreamError):  # told when ranks agree again
            self._wait()
        self._plan = None

    def error(self) -> BaseException | None:
        return self._untold

    def flush(self) -> bool:
        untold, self._untold = self._untold, None
        if untold is not None:
            raise untold
        return False

    def drop(self) -> None:
        self._untold = None

    def forget(self, params: list[Any]) -> None:
        self._plan = None

    def plan(self, params: ParameterSet) -> None:
        with SharedFailure(self._communicator.handshake, OPERATION):
            like = [_without_memory(param.array) for param in params.params]
            device = device_of(params.params[0].array)
            stream = new_stream(device)
        order: list[int] = self._communicator.bcast_obj(self._order)
        self._settle()
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

    def close(self) -> None:
        if self._own is None:
            return
        rows = self._communicator.handshake(OPERATION, payload=bytes([self.is_planned]))
        if len(set(rows)) > 1:
            self.discard()
        self._plan = None
        self._settle()
        self._own.finalize()
        self._own = None

    def _is_outdated(self, params: ParameterSet) -> bool:
        """Return whether there is a plan for other parameters, or for messages in another dtype."""
        plan, own = self._plan, self._own
        if plan is None or own is None:
            return False
        return plan.params is not params or _wire_dtype(own) != _wire_dtype(self._communicator)

    def _start(self, plan: _Plan) -> _Sending:
        mean = self._communicator.start_mean(self._zero_fill, OPERATION, self._own)
        self._sending = _Sending(plan, mean)
        return self._sending

    def _wait(self) -> None:
        """Wait for what is under way, raising what made it fail."""
        sending, self._sending = self._sending, None
        if sending is not None:
            with region("communication"):
                error = sending.thread.wait()
            try:
                if error is None:
                    error = _wait_on_device(sending.plan)
                if isinstance(error, StreamError):  # the others keep their plans
                    self._untold = StreamError(str(error))  # without a traceback's arrays
                elif error is not None:
                    self._plan = None
                if error is not None:
                    raise error
            finally:
                del error  # else a cycle through its traceback would keep the gradients' memory

    def _settle(self) -> None:
        """Wait for what was left alone, which all ranks have sent by now."""
        if self._left_alone is not None:
            self._left_alone.wait()
            self._left_alone = None


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


def _without_memory(array: Any) -> Any:
    """Return an array of the same shape and dtype that holds one number."""
    with chainer.using_device(chainer.backend.get_device_from_array(array)):
        module = chainer.backend.get_array_module(array)
        return module.broadcast_to(module.zeros((), array.dtype), array.shape)


def _is_like(grad: Any, like: Any) -> bool:
    same = grad.shape == like.shape and grad.dtype == like.dtype
    return bool(same and type(grad) is type(like))


def _is_plain(params: ParameterSet) -> bool:
    """Return whether all parameters are real floats, of NumPy's arrays or of one GPU's."""
    arrays = [param.array for param in params.params]
    if not {np.ndarray} >= set(map(type, arrays)):
        devices = {device_of(array) for array in arrays}
        if None in devices or len(devices) > 1:
            return False
    return all([array.dtype.kind == "f" for array in arrays])
