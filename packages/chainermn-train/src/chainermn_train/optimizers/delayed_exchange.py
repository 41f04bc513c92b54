"""Double buffering: the mean of one step's gradients is taken while the next step computes."""

from __future__ import annotations

import threading
from typing import Any

from chainermn_comm import CommunicatorBase, Reducer, Work, patient_waits

from ..background_thread import BackgroundThread, threads_may_use_mpi
from ..collective_errors import raise_together
from .agreement import OPERATION
from .gpus import device_of, new_stream, recorded_event, using_stream
from .gradient_exchange import GradientExchange, make_channel
from .gradient_set import GradientSet, multiply_gradients
from .parameter_set import ParameterSet

_ALONE = "with double_buffering gradients are as old as ever"


class DelayedExchange(GradientExchange):
    """Each update steps along the means of the update before it."""

    is_delayed = True

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        super().__init__(communicator, zero_fill)
        # Of the update that has begun.
        self._gradients: GradientSet | None = None
        # Where gradients are on a GPU: it, its stream for the thread, and when they are
        # computed.
        self._device: Any = None
        self._stream: Any = None
        self._computed: Any = None

    def ready(self, params: ParameterSet, scale: float | None) -> Reducer:
        reducer = self._communicator.make_reducer(
            self._zero_fill, OPERATION, self.channel
        )
        # All that can fail on one rank alone, before ranks agree; the thread finds it
        # done.
        with raise_together(self._communicator.handshake, OPERATION, meet=False):
            gradients = GradientSet.detach_from(params, scale)
            self._reducer = reducer
            self._gradients = gradients
            if self.pending is None:
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

    def finish(
        self, params: ParameterSet, scale: float | None, factor: float = 1.0
    ) -> bool:
        assert self._reducer is not None  # else nothing was ready
        assert self._gradients is not None
        gradients = self._gradients
        thread = self._thread_of(self._reducer.start(), gradients, factor)
        self._reducer = None
        self._gradients = None
        try:
            return self.apply_pending()  # of the update before
        finally:  # also where that fails: the other ranks exchange these
            self.pending = gradients
            self._thread = thread
            if self.channel is None:  # the first mean is taken at once
                thread.wait()
                self.channel = make_channel(self._communicator, self._device)
            elif not (threads_may_use_mpi(_ALONE) and thread.start()):
                thread.wait()  # other means on the GPU wait for these

    def _thread_of(
        self, work: Work, gradients: GradientSet, factor: float
    ) -> BackgroundThread:
        device = self._device
        stream = self._stream
        computed = self._computed

        def exchange(wait_requested: threading.Event) -> None:
            with patient_waits(wait_requested), using_stream(device, stream, computed):
                work.wait()
                work.assign()
                if factor != 1:
                    multiply_gradients(gradients.gradients, factor)

        return BackgroundThread(exchange)

    def cancel(self) -> None:
        super().cancel()
        if self._gradients is not None:
            self._gradients.assign()
            self._gradients = None
