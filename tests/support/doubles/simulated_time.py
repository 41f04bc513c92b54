"""Ranks whose clocks go on only when a test says so, and which wait for one another in it."""

from __future__ import annotations

from typing import Any

from tests.support.worlds.third_party import PlainCommunicator


class SimulatedTime:
    """The seconds that have passed on this rank; in place of `time.perf_counter`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class SimulatedCommunicator(PlainCommunicator):
    """A handshake ends when the last rank has come to it; a mean of gradients takes long."""

    def __init__(self, mpi: Any, time: SimulatedTime, seconds: float = 0.0) -> None:
        super().__init__(mpi)
        self.time, self.seconds = time, seconds

    def handshake(self, *arguments, **options):
        payloads = super().handshake(*arguments, **options)
        self.time.now = max(self.mpi.allgather(self.time.now))
        return payloads

    def multi_node_mean_grad(self, model, zero_fill=False):
        super().multi_node_mean_grad(model, zero_fill)
        self.time.sleep(self.seconds)
