"""Gradients that travel while backward computes the others; no step is along old ones.

Ranks plan after a synchronous update: rank 0's order, in which gradients became final, is cut into
buckets. From then on a thread sends each bucket as soon as it is final, on a communicator of its
own, and ranks agree once, after backward.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase, MeanInProgress, RankMismatchError, patient_waits

from ..profiling import region
from . import tracked_backward
from .agreement import OPERATION
from .background_thread import BackgroundThread, threads_may_use_mpi
from .detached_gradients import DetachedGradient, DetachedGradients, multiply_gradients
from .own_channel import make_channel
from .parameter_set import ParameterSet
from .synchronous_exchange import SynchronousExchange

# Long enough that a bucket's costs don't count, short enough that the first one leaves early.
BUCKET_BYTES = 1 << 20
_ALONE = "gradients are exchanged after backward"


class _Plan(NamedTuple):
    """What all ranks send in an update: places of parameters by bucket, in order."""

    params: ParameterSet
    buckets: list[list[int]]
    bucket_of: dict[int, int]  # by the parameter's place
    like: list[Any]  # an array of each parameter's shape and dtype


class _Sending:
    """One update's buckets on their way."""

    def __init__(self, plan: _Plan, mean: MeanInProgress) -> None:
        self.plan, self.mean = plan, mean
        self.final: dict[int, Any] = {}  # by place: the gradients that backward told of
        self._left = list(map(len, plan.buckets))
        self._gradients: list[DetachedGradients] = []  # handed in

        def reduce(wait_requested: threading.Event) -> None:
            with patient_waits(wait_requested):
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
        params, right = self.plan.params.params, True
        for place, param in enumerate(params):
            grad = param.grad if with_gradients and param.is_initialized else None
            if place in self.final:
                right = right and grad is self.final[place]
            elif grad is not None:
                like = self.plan.like[place]
                if type(grad) is type(like) and (grad.shape, grad.dtype) == (
                    like.shape,
                    like.dtype,
                ):
                    self.final[place] = grad
                else:
                    right = False
        while len(self._gradients) < len(self._left):
            self._hand_in()
        return right

    def _hand_in(self) -> None:
        named = self.plan.params.namedparams()
        places = self.plan.buckets[len(self._gradients)]
        self._gradients.append(
            DetachedGradients(
                [DetachedGradient(*named[place], self.final.get(place), None) for place in places]
            )
        )
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
    """

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        super().__init__(communicator, zero_fill)
        self._own: CommunicatorBase | None = None
        self._plan: _Plan | None = None
        self._sending: _Sending | None = None
        self._order: list[int] = []  # of places, as this update's gradients became final
        self._is_over = True  # whether this update has sent all it will
        self._is_given_up = not tracked_backward.is_available
        self.must_redo = False

    @property
    def is_planned(self) -> bool:  # type: ignore[override]
        return self._plan is not None

    def begin(self) -> None:
        self._order, self._is_over, self.must_redo = [], False, False

    def backward(self, params: ParameterSet, loss: Any, loss_scale: float | None) -> None:
        if self._is_given_up or type(loss) is not chainer.Variable or not _is_plain(params):
            super().backward(params, loss, loss_scale)
            return
        on_final = lambda place, _: self._order.append(place)  # noqa: E731
        if self._plan is not None:
            on_final = self._start(self._plan).tell
        tracked_backward.backward(loss, params.params, on_final, loss_scale)

    def ready(self, params: ParameterSet) -> MeanInProgress:
        if self._plan is None or self._is_over:
            return super().ready(params)
        sending = self._sending or self._start(self._plan)
        self.must_redo = not sending.tell_rest(with_gradients=True)
        return sending.mean

    def finish(self, factor: float = 1.0) -> bool:
        if self._sending is None:
            handed_in = self._handed_in
            super().finish(factor)
            if self._plan is None and not self._is_given_up and handed_in is not None:
                self._make_plan(*handed_in)
            return True
        sending, params = self._sending, self._sending.plan.params.params
        self._wait()
        sending.assign()
        if factor != 1:
            multiply_gradients(params, factor)
        return True

    def discard(self) -> None:
        super().discard()
        self._wait()

    def redo(self) -> None:
        self._wait()
        self._is_given_up, self._plan = True, None

    def abandon(self, error: BaseException | None) -> None:
        super().discard()
        if isinstance(error, RankMismatchError):  # others don't send
            self.lose()
        elif self._plan is not None and not self._is_over:
            sending = self._sending or self._start(self._plan)
            sending.tell_rest(with_gradients=False)
            self._wait()

    def lose(self) -> None:
        super().discard()
        # What waits there for other ranks may wait for ever.
        self._plan = self._sending = self._own = None
        self._is_over = True

    def forget(self, params: list[Any]) -> None:
        self._plan = None

    def close(self) -> None:
        self._plan = None
        if self._own is not None:
            self._own.finalize()
            self._own = None

    def _start(self, plan: _Plan) -> _Sending:
        mean = self._communicator.start_mean(self._zero_fill, OPERATION, self._own)
        self._sending = _Sending(plan, mean)
        return self._sending

    def _wait(self) -> None:
        """Wait for what is under way, raising what made it fail."""
        self._is_over = True
        sending, self._sending = self._sending, None
        if sending is not None:
            with region("communication"):
                error = sending.thread.wait()
            try:
                if error is not None:
                    raise error
            finally:
                del error  # else a cycle through its traceback would keep the gradients' memory

    def _make_plan(self, mean: MeanInProgress, params: ParameterSet) -> None:
        """Cut rank 0's order into buckets (collective)."""
        order: list[int] = self._communicator.bcast_obj(self._order)
        if not order:  # rank 0 had no loss function
            return
        if not _is_plain(params) or not mean.takes_plans or not threads_may_use_mpi(_ALONE):
            self._is_given_up = True
            return
        if self._own is None:
            self._own = make_channel(self._communicator)
        like = [param.array for param in params.params]
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
        self._plan = _Plan(params, buckets, bucket_of, like)


def _is_like(grad: Any, like: np.ndarray) -> bool:
    same = grad.shape == like.shape and grad.dtype == like.dtype
    return bool(same and type(grad) is np.ndarray)


def _is_plain(params: ParameterSet) -> bool:
    """Return whether all parameters are NumPy arrays of real floats."""
    arrays = [param.array for param in params.params]
    return all([type(array) is np.ndarray and array.dtype.kind == "f" for array in arrays])
