"""Times of training steps and of the communication within them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .wrappers import AttributeProxy

# Kernels run asynchronously. A step whose shares are measured has to wait for its
# kernels, which costs a little overlap. So on GPUs only one out of this number of steps
# is measured.
STEPS_PER_SAMPLE_ON_GPU = 16

# .clock: the clock of the step that this thread is in; None within a region.
_thread = threading.local()


@dataclass
class StepTimes:
    """How long training steps took, in seconds, and the communication within them."""

    steps: int = 0
    seconds: float = 0.0
    # The seconds of the steps whose shares were measured; on CPUs, of all steps.
    sampled: float = 0.0
    waiting: float = 0.0  # the part of `sampled` in which ranks wait for each other
    # The part of `sampled` in which gradients and parameters are exchanged.
    communication: float = 0.0

    @property
    def computing(self) -> float:
        """The time that was neither waiting nor communication."""
        return self.seconds * (1 - (self.waiting + self.communication) / self.sampled)


class StepClock:
    """Adds up the times of training steps."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self.times = StepTimes()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step, in which :func:`region` uses this clock."""
        times = self.times
        is_sample = (
            self._synchronize is None or times.steps % STEPS_PER_SAMPLE_ON_GPU == 0
        )
        start = self.now(is_sample)
        if is_sample:
            _thread.clock = self
        try:
            yield
        finally:
            seconds = self.now(is_sample) - start
            _thread.clock = None
        times.steps += 1
        times.seconds += seconds
        if is_sample:
            times.sampled += seconds

    def now(self, after_kernels: bool = True) -> float:
        if after_kernels and self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


@contextmanager
def region(kind: str) -> Iterator[None]:
    """Count the time within as ``'waiting'`` or ``'communication'``, in this thread's timed step.

    The exchange of gradients and parameters is communication. Ranks wait for each other
    just before the exchange, when they agree on a few numbers. An inner region belongs to
    the outer region.
    """
    clock = getattr(_thread, "clock", None)
    if clock is None:
        yield
        return
    _thread.clock = None
    start = clock.now()
    try:
        yield
    finally:
        vars(clock.times)[kind] += clock.now() - start
        _thread.clock = clock


class TimedUpdater(AttributeProxy):
    """An updater whose steps are timed."""

    _OWN = frozenset({"actual", "clock"})

    def __init__(self, actual: Any, clock: StepClock) -> None:
        if isinstance(actual, TimedUpdater):
            raise ValueError(
                "a trainer takes one ThroughputReport, and has one already"
            )
        super().__init__(actual)
        self.clock = clock

    def update(self) -> None:
        with self.clock.step():
            self.actual.update()
