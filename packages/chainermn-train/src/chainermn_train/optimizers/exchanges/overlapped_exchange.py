"""Gradients that travel while backward computes more gradients; no step uses old gradients.

Ranks plan after a synchronous update: they cut the order in which rank 0's gradients
became final into buckets. From then on ranks agree before backward that all send. A
thread sends each bucket as soon as its gradients are final, on its own communicator.
After backward, ranks agree that none has failed.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import chainer

from chainermn_comm import (
    CommunicationError,
    CommunicatorBase,
    Reducer,
    Work,
    patient_waits,
)

from ...background_thread import BackgroundThread, raise_if_any, threads_may_use_mpi
from ...collective_errors import raise_together
from ...profiling import region
from ..agreement import OPERATION
from ..gradient_set import (
    Gradient,
    GradientSet,
    form_of,
    is_updated,
    present_gradient,
)
from ..parameter_set import ParameterSet
from . import tracked_backward
from .buckets import bounds_of
from .gpus import ThreadStream, device_of
from .gradient_exchange import GradientExchange, make_channel


@dataclass(frozen=True)
class _Plan:
    """The buckets that all ranks send in an update.

    Attributes:
        facts: the facts for which the plan was made; see ``_facts_of``.
        order: the indices of parameters in the set, in the order in which their
            gradients leave.
        bounds: the beginnings of buckets in this order, and the end of the last bucket.
        stream: the thread's stream.
    """

    facts: list[Any]
    order: list[int]
    bounds: list[int]
    stream: ThreadStream


class _Sending:
    """The buckets that one update sends during backward."""

    def __init__(self, plan: _Plan, reducer: Reducer, params: ParameterSet) -> None:
        self.reducer = reducer
        self.stream = plan.stream
        named = params.namedparams()
        # In the order in which they leave.
        self.gradients = [Gradient(*named[number]) for number in plan.order]
        self._bounds = plan.bounds
        # The number of gradients, in order, before the first missing gradient.
        self._num_final = 0
        self.works: list[Work] = []  # of the buckets that were sent
        self._queue: SimpleQueue[Work] = SimpleQueue()
        self.thread = BackgroundThread(self._reduce)

    def _reduce(self, wait_requested: threading.Event) -> None:
        with patient_waits(wait_requested), self.stream.using(wait=False):
            for _ in self._bounds[1:]:
                self._queue.get().wait()

    def add(self, position: int, grad: Any) -> None:
        """Add the final gradient of this position in the order; send buckets that are complete."""
        self.gradients[position].grad = grad
        for own in self.gradients[self._num_final :]:
            if own.grad is None:
                break
            self._num_final += 1
            if self._num_final == self._bounds[len(self.works) + 1]:
                self._send_next()

    def add_rest(self) -> None:
        """Send the remaining gradients; RuntimeError if a gradient was replaced after it left."""
        for own in self.gradients:
            grad = present_gradient(own.param)
            if own.grad is None:
                own.grad = grad
            elif own.grad is not grad:
                raise RuntimeError(
                    f"the gradient of {own.name} was replaced after it had been sent: "
                    "where backward is not Chainer's own, use overlap=False"
                )
        self._send_rest()

    def end(self) -> None:
        """Send zeros in place of the remaining gradients, since other ranks wait for them."""
        for own in self.gradients[self._bounds[len(self.works)] :]:
            own.grad = None
        self._send_rest()
        self.thread.wait()

    def _send_rest(self) -> None:
        while len(self.works) < len(self._bounds) - 1:
            self._send_next()

    def _send_next(self) -> None:
        number = len(self.works)
        start, stop = self._bounds[number : number + 2]
        bucket = GradientSet(self.gradients[start:stop], None)
        work = self.reducer.add_planned(bucket)
        self.works.append(work)
        self._queue.put(work)


class OverlappedExchange(GradientExchange):
    """Each update steps along the means of its own gradients, which leave during backward.

    Without a plan, gradients are sent after backward. All ranks have the same plan. Once
    ranks have agreed to send, each sends all its buckets; a rank that fails meanwhile
    sends zeros.
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

    @property
    def can_plan(self) -> bool:  # type: ignore[override]
        return len(self._order) > 0

    def can_send(self, params: ParameterSet, loss: Any) -> bool:
        plan = self._plan
        if plan is None or type(loss) is not chainer.Variable:
            return False
        return plan.facts == self._facts_of(params)

    def backward(
        self, params: ParameterSet, loss: Any, scale: float | None, sends: bool = False
    ) -> None:
        self._order = []
        if sends:
            assert self._plan is not None
            reducer = self._communicator.make_reducer(
                self._zero_fill, OPERATION, self.channel
            )
            sending = _Sending(self._plan, reducer, params)
            self._sending = sending
            sending.thread.start()
            ordered = [own.param for own in sending.gradients]
            tracked_backward.backward(loss, ordered, sending.add, scale)
        elif self._can_track(params, loss):
            note = lambda number, _: self._order.append(number)  # noqa: E731
            tracked_backward.backward(loss, params.params, note, scale)
        else:
            super().backward(params, loss, scale)

    def reducer_of(self, params: ParameterSet, scale: float | None) -> Reducer:
        if self._sending is None:
            return super().reducer_of(params, scale)
        with raise_together(self._communicator.handshake, OPERATION, meet=False):
            self._sending.add_rest()
        return self._sending.reducer

    def finish(self, params: ParameterSet, scale: float | None, factor: float) -> bool:
        sending = self._sending
        if sending is None:
            return super().finish(params, scale, factor)
        self._sending = None
        with region("communication"):
            raise_if_any(sending.thread.wait())
        sending.stream.join()
        # `factor` is 1: each rank that sends has computed the gradients of one update,
        # and with `accumulate_steps` another exchange is used.
        for work in sending.works:
            work.assign()
        GradientSet(sending.gradients, scale).assign()
        return True

    def cancel(self) -> None:
        super().cancel()
        sending = self._sending
        self._sending = None
        if sending is not None:
            sending.end()
            with contextlib.suppress(CommunicationError):  # the job is about to end
                sending.stream.join()

    def _can_track(self, params: ParameterSet, loss: Any) -> bool:
        """Return whether gradients can leave during backward, with the same means as after it.

        Final gradients are known for plain losses, and parameters that are real floats.
        """
        if type(loss) is not chainer.Variable:
            return False
        arrays = [param.array for param in params.params]
        if any([array is None or array.dtype.kind != "f" for array in arrays]):
            return False
        if self._only_on_gpus and device_of(arrays) is None:
            return False
        # A communicator of the user's own has no settings to ask for.
        if not self._communicator.make_reducer().takes_plans:
            return False
        if _rounds_by_message(arrays, self._communicator):
            return False
        return threads_may_use_mpi()

    def plan(self, params: ParameterSet) -> None:
        arrays = [param.array for param in params.params]
        with raise_together(self._communicator.handshake, OPERATION, meet=False):
            stream = ThreadStream(device_of(arrays))
        order = [
            number
            for number in dict.fromkeys([*self._order, *range(len(arrays))])
            if is_updated(params.params[number])
        ]
        self._order = []
        # Rank 0's order, so that all ranks have the same plan.
        order = self._communicator.bcast_obj(order)
        if self.channel is None:
            self.channel = make_channel(self._communicator, stream.device)
        bounds = bounds_of([arrays[number] for number in order])
        self._plan = _Plan(self._facts_of(params), order, bounds, stream)

    def drop(self) -> None:
        super().drop()
        self._plan = None
        self._order = []

    def _facts_of(self, params: ParameterSet) -> list[Any]:
        """Return the facts on which a plan depends; if one of them changes, the plan is void."""
        forms = [(form_of(param.array), is_updated(param)) for param in params.params]
        wire_dtype = self._communicator.get_config("allreduce_grad_dtype")
        return [params, self.channel, wire_dtype, *forms]


def _rounds_by_message(arrays: list[Any], communicator: CommunicatorBase) -> bool:
    """Return whether the rounding of a number may depend on other numbers in its message.

    It may if numbers are sent in a narrower dtype, such as a node's sum of 16-bit numbers.
    With ``reproducible`` numbers are rounded alike in any message.
    """
    if communicator.get_config("reproducible"):
        return False
    widths = {array.dtype.itemsize for array in arrays}
    if 2 in widths and 1 < communicator.inter_size < communicator.size:
        return True
    wire = communicator.get_config("allreduce_grad_dtype")
    return wire is not None and any(width > wire.itemsize for width in widths)
