"""Double buffering: the mean of one step's gradients is taken while the next step computes."""

from __future__ import annotations

import copy
import threading
from typing import Any

import chainer

from chainermn_comm import CommunicatorBase, MeanInProgress, patient_waits

from ..collective_errors import SharedFailure
from ..profiling import region
from .agreement import OPERATION
from .background_thread import BackgroundThread, threads_may_use_mpi
from .detached_gradients import DetachedGradients, copy_of, multiply_gradients
from .gpus import device_of, new_stream, recorded_event, using_stream
from .gradient_exchange import GradientExchange
from .own_channel import make_channel
from .parameter_set import ParameterSet

_ALONE = "with double_buffering gradients are as old as ever"


class DelayedExchange(GradientExchange):
    """Each update steps along the means of the update before it."""

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        super().__init__(communicator, zero_fill)
        # The training thread can use the given one meanwhile.
        self._own: CommunicatorBase | None = None
        self._thread: BackgroundThread | None = None
        self._handed_in: tuple[MeanInProgress, DetachedGradients] | None = None
        self._under_way: DetachedGradients | None = None  # or their means, once they have come
        # Where gradients are on a GPU: it, its stream for the thread, and when they are computed.
        self._device: Any = None
        self._stream: Any = None
        self._computed: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedExchange:
        twin = memo[id(self)] = DelayedExchange(self._communicator, self._zero_fill)
        if self.error() is None:
            twin._under_way = copy.deepcopy(self._under_way, memo)
        return twin

    @property
    def is_prepared(self) -> bool:  # type: ignore[override]
        return self._own is not None

    def prepare(self, params: ParameterSet) -> None:
        if self._own is None:
            self._own = make_channel(self._communicator, params)

    def error(self) -> BaseException | None:
        with region("communication"):
            return None if self._thread is None else self._thread.wait()

    def ready(self, params: ParameterSet) -> MeanInProgress:
        mean = self._communicator.start_mean(self._zero_fill, OPERATION, self._own)
        # All that can fail on one rank alone, before ranks agree; the thread finds it done.
        with SharedFailure(self._communicator.handshake, OPERATION):
            gradients = DetachedGradients.detach_from(params)
            self._handed_in = mean, gradients
            if self._under_way is None:
                self._give_copies(gradients)
            devices = [device_of(each.grad) for each in gradients.entries]
            self._device = next(filter(None, devices), None)
            if self._stream is None:
                self._stream = new_stream(self._device)
            self._computed = recorded_event(self._device)
        mean.add(gradients)
        return mean

    def finish(self, factor: float = 1.0) -> bool:
        assert self._handed_in is not None  # else nothing was ready
        mean, gradients = self._handed_in
        self._handed_in = None
        before = self._pop()
        device, stream, computed = self._device, self._stream, self._computed

        def exchange(wait_requested: threading.Event) -> None:
            with patient_waits(wait_requested), using_stream(device, stream, computed):
                mean.reduce()
                mean.assign()
                if factor != 1:
                    multiply_gradients(gradients.entries, factor)

        self._under_way = gradients
        self._thread = BackgroundThread(
            exchange,
            threaded=threads_may_use_mpi(_ALONE),
        )
        if before is None:
            return False
        before.assign()
        return True

    def discard(self) -> None:
        if self._handed_in is not None:
            _, gradients = self._handed_in
            gradients.assign()
            self._handed_in = None

    def drop(self) -> None:
        self.error()
        self._under_way = self._thread = None

    def forget(self, params: list[Any]) -> None:
        if self.error() is None and self._under_way is not None:
            self._under_way.discard(params)

    def flush(self) -> bool:
        means = self._pop()
        if means is not None:
            means.assign()
        return means is not None

    def serialize(self, serializer: Any, target: Any) -> None:
        loading = isinstance(serializer, chainer.Deserializer)
        means = None if loading else self._means()
        if serializer("in_flight", means is not None):
            if means is None:
                means = DetachedGradients.load(serializer["means"], target)
            else:
                means.save(serializer["means"])
        if loading:
            self.error()
            self._under_way, self._thread = means, None

    def close(self) -> None:
        self.error()
        if self._own is not None:
            self._own.finalize()
            self._own = None

    def _pop(self) -> DetachedGradients | None:
        """Wait for the means and remove them, raising what made the exchange fail; or None."""
        try:
            return self._means()
        finally:
            self._under_way = self._thread = None

    def _means(self) -> DetachedGradients | None:
        """Wait for the means and return them, raising what made the exchange fail; or None."""
        error = self.error()
        try:
            if error is not None:
                raise error
            return self._under_way
        finally:
            del error  # else a cycle through its traceback would keep the gradients' memory

    def _give_copies(self, gradients: DetachedGradients) -> None:
        """Give parameters copies of their own gradients, for what looks at them."""
        for each in gradients.entries:
            if each.grad is not None:
                each.param.grad = copy_of(each.param, each.grad)
