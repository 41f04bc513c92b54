"""Times the parts of a training step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .forwarding import Forwarding

# Kernels run behind Python's back. A step whose shares are measured has to wait for them, which
# costs a little overlap, so on GPUs only one step in so many is.
STEPS_PER_SAMPLE_ON_GPU = 16

_thread = threading.local()  # .clock: that of the step which this thread is in; None in a part


class StepClock:
    """Adds up the time of training steps, and of the communication within them.

    Attributes:
        steps: number of steps.
        seconds: their time.
        sampled: time of those steps whose shares were measured: all of them on CPUs.
        waiting: of ``sampled``, the time in which ranks wait for one another.
        wire: of ``sampled``, the time in the exchange of gradients and parameters.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self.clear()

    def clear(self) -> None:
        self.steps = 0
        self.seconds = self.sampled = self.waiting = self.wire = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times a step, in which :func:`part` knows this clock."""
        sample = self._synchronize is None or self.steps % STEPS_PER_SAMPLE_ON_GPU == 0
        outer = getattr(_thread, "clock", None)
        parts = self.waiting, self.wire
        start = self.now(sample)
        _thread.clock = self if sample else None
        try:
            yield
        finally:
            seconds = self.now(sample) - start
            _thread.clock = outer
        self.steps += 1
        self.seconds += seconds
        self.sampled += seconds if sample else 0.0
        if outer is not None:  # of another report on the same steps
            outer.waiting += self.waiting - parts[0]
            outer.wire += self.wire - parts[1]

    def now(self, after_kernels: bool = True) -> float:
        if after_kernels and self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


@contextmanager
def part(kind: str) -> Iterator[None]:
    """Counts what is within as ``'waiting'`` or ``'wire'``, if this thread is in a timed step.

    The exchange of gradients and parameters is on the wire. Just before it ranks agree on a few
    numbers, in which they wait for one another, so that they come to the former together.

    A part within a part belongs to the outer one.
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
        setattr(clock, kind, getattr(clock, kind) + clock.now() - start)
        _thread.clock = clock


class TimedUpdater(Forwarding):
    """An updater whose steps are timed."""

    _OWN = frozenset({"actual", "clock"})

    def __init__(self, actual: Any, clock: StepClock) -> None:
        super().__init__(actual)
        self.clock = clock

    def update(self) -> None:
        with self.clock.step():
            self.actual.update()
