"""Times the parts of a training step from outside, by wrapping the updater and communicator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..forwarding import Forwarding

# What moves gradients and parameters. MultiNodeOptimizer exchanges a few integers just before,
# so ranks enter these together, and what a rank waits for the others is in the former's time.
WIRE = frozenset({"multi_node_mean_grad", "allreduce_grad", "bcast_data"})
# Kernels run behind Python's back. A step whose shares are measured has to wait for them, which
# costs a little overlap, so on GPUs only one step in so many is.
STEPS_PER_SAMPLE_ON_GPU = 16


class StepClock:
    """Adds up the time of training steps, and of the communication within them.

    Attributes:
        steps: number of steps.
        seconds: their time.
        sampled: time of those steps whose shares were measured: all of them on CPUs.
        waiting: of ``sampled``, the time in collectives other than ``WIRE``.
        wire: of ``sampled``, the time in ``WIRE``.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._thread: int | None = None  # that of the step, while its shares are measured
        self.clear()

    def clear(self) -> None:
        self.steps = 0
        self.seconds = self.sampled = self.waiting = self.wire = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times a step."""
        sample = self._synchronize is None or self.steps % STEPS_PER_SAMPLE_ON_GPU == 0
        start = self._now(sample)
        self._thread = threading.get_ident() if sample else None
        try:
            yield
        finally:
            seconds = self._now(sample) - start
            self._thread = None
        self.steps += 1
        self.seconds += seconds
        self.sampled += seconds if sample else 0.0

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Times a collective call, if a step's own thread makes it."""
        if self._thread != threading.get_ident():
            yield
            return
        start = self._now(True)
        try:
            yield
        finally:
            seconds = self._now(True) - start
            if name in WIRE:
                self.wire += seconds
            else:
                self.waiting += seconds

    def _now(self, after_kernels: bool) -> float:
        if after_kernels and self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


class TimedUpdater(Forwarding):
    """An updater whose steps are timed."""

    _OWN = frozenset({"actual", "clock"})

    def __init__(self, actual: Any, clock: StepClock) -> None:
        super().__init__(actual)
        self.clock = clock

    def update(self) -> None:
        with self.clock.step():
            self.actual.update()


class TimedCommunicator(Forwarding):
    """A communicator whose calls are timed; copies of what holds it share it."""

    _OWN = frozenset({"actual", "clock"})

    def __init__(self, actual: Any, clock: StepClock) -> None:
        super().__init__(actual)
        self.clock = clock

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        if not callable(attribute):
            return attribute

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.clock.collective(name):
                return attribute(*args, **kwargs)

        return timed

    def __copy__(self) -> TimedCommunicator:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TimedCommunicator:
        return self
