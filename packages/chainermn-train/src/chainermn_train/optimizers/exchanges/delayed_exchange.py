"""Double buffering: the mean of one step's gradients is taken while the next step computes."""

from __future__ import annotations

import threading
from typing import Any

from chainermn_comm import CommunicatorBase, Reducer, patient_waits

from ...background_thread import BackgroundThread
from ...collective_errors import raise_together
from ..agreement import OPERATION
from ..gradient_set import GradientSet, multiply_gradients
from ..parameter_set import ParameterSet
from .gpus import ThreadStream, device_of
from .gradient_exchange import GradientExchange, make_channel


class DelayedExchange(GradientExchange):
    """Each update steps along the means of the update before it."""

    def __init__(self, communicator: CommunicatorBase, zero_fill: bool) -> None:
        super().__init__(communicator, zero_fill)
        self._gradients: Any = None  # the `GradientSet` of the update that has begun
        self._stream: Any = None  # the thread's `ThreadStream`
        self._computed: Any = None  # the event after which gradients on a GPU are there

    def reducer_of(self, params: ParameterSet, scale: float | None) -> Reducer:
        reducer = self._communicator.make_reducer(
            self._zero_fill, OPERATION, self.channel
        )
        # Work that can fail on one rank alone is done here, before ranks agree.
        with raise_together(self._communicator.handshake, OPERATION, meet=False):
            self._gradients = GradientSet.detach_from(params, scale)
            self._reducer = reducer
            if self.pending is None:
                self._gradients.give_copies()
            if self._stream is None:
                # The parameters' device, since a rank may have no gradient, and all ranks
                # must make the channel for the same kind of device.
                device = device_of([param.array for param in params.params])
                self._stream = ThreadStream(device)
            self._computed = self._stream.recorded_event()
        reducer.add(self._gradients)
        return reducer

    def finish(self, params: ParameterSet, scale: float | None, factor: float) -> bool:
        work = self._reducer.start()
        self._reducer = None
        gradients = self._gradients
        self._gradients = None
        stream = self._stream.using(after=self._computed)

        def exchange(wait_requested: threading.Event) -> None:
            with patient_waits(wait_requested), stream:
                work.wait()
                work.assign()
                if factor != 1:
                    multiply_gradients(gradients.gradients, factor)

        thread = BackgroundThread(exchange)
        try:
            return self.assign_pending()  # of the update before
        finally:  # even after an error, because the other ranks exchange these gradients
            self.pending = gradients
            self._thread = thread
            if self.channel is None:  # the first mean is taken at once
                thread.wait()
                self.channel = make_channel(self._communicator, self._stream.device)
            else:
                thread.start()

    def load_pending(self, serializer: Any, target: Any) -> None:
        self.pending = GradientSet.load(serializer, target)

    def cancel(self) -> None:
        super().cancel()
        if self._gradients is not None:
            self._gradients.assign()
            self._gradients = None
