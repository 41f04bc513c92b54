"""Double buffering: the mean of one step's gradients is taken while the next step computes."""

from __future__ import annotations

import copy
import threading
from typing import Any

from chainermn_comm import CommunicatorBase, Reducer, patient_waits

from ..background_thread import BackgroundThread, threads_may_use_mpi
from ..collective_errors import raise_together
from ..profiling import region
from .decision import OPERATION
from .gpus import device_of, new_stream, recorded_event, using_stream
from .gradient_exchange import GradientExchange, make_channel
from .gradient_set import GradientSet, multiply_gradients
from .parameter_set import ParameterSet

_ALONE = "with double_buffering gradients are as old as ever"


class DelayedExchange(GradientExchange):
    """Each update steps along the means of the update before it."""

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        super().__init__(communicator, zero_fill)
        self._thread: BackgroundThread | None = None
        # Where gradients are on a GPU: it, its stream for the thread, and when they are
        # computed.
        self._device: Any = None
        self._stream: Any = None
        self._computed: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedExchange:
        twin = memo[id(self)] = DelayedExchange(self._communicator, self._zero_fill)
        if self.error() is None:
            twin._flight = copy.deepcopy(self._flight, memo)
        return twin

    def error(self) -> BaseException | None:
        with region("communication"):
            return None if self._thread is None else self._thread.wait()

    def ready(self, params: ParameterSet, scale: float | None) -> Reducer:
        reducer = self._communicator.make_reducer(
            self._zero_fill, OPERATION, self.channel
        )
        # All that can fail on one rank alone, before ranks agree; the thread finds it
        # done.
        with raise_together(self._communicator.handshake, OPERATION, meet=False):
            gradients = GradientSet.detach_from(params, scale)
            self._handed_in = reducer, gradients, scale
            if self._flight is None:
                gradients.give_copies()
            # Also where this rank has none, as all make the channel for the same
            # device.
            devices = [device_of(each.data) for each in gradients.gradients]
            self._device = next(filter(None, devices), None)
            if self._stream is None:
                self._stream = new_stream(self._device)
            self._computed = recorded_event(self._device)
        reducer.add(gradients)
        return reducer

    def finish(self, factor: float = 1.0) -> bool:
        assert self._handed_in is not None  # else nothing was ready
        reducer, gradients, _ = self._handed_in
        self._handed_in = None
        work = reducer.start()
        device, stream, computed = self._device, self._stream, self._computed

        def exchange(wait_requested: threading.Event) -> None:
            with patient_waits(wait_requested), using_stream(device, stream, computed):
                work.wait()
                work.assign()
                if factor != 1:
                    multiply_gradients(gradients.gradients, factor)

        try:
            return self.assign_flight()  # of the update before
        finally:  # also where that fails: the others exchange these
            self._flight, self._thread = gradients, BackgroundThread(exchange)
            if self.channel is None:  # the first mean is taken at once
                self._thread.wait()
                self.channel = make_channel(self._communicator, device)
            elif not (threads_may_use_mpi(_ALONE) and self._thread.start()):
                self._thread.wait()  # other means on the GPU wait for these

    def cancel(self) -> None:
        if self._handed_in is not None:
            self._handed_in[1].assign()
            self._handed_in = None

    def put_flight(self, means: GradientSet | None) -> None:
        self.error()
        self._flight, self._thread = means, None
