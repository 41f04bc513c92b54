"""Calls of a size go the way that was fastest when the first of that size were measured."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from chainermn_comm.allreduce.autotuner import TRIALS, Autotuner

pytestmark = pytest.mark.world


class Way:
    """An algorithm that takes some seconds a byte, by a clock of the test's."""

    clock = 0.0

    def __init__(self, seconds):
        self.seconds, self.calls = seconds, 0

    def allreduce(self, operand):
        self.calls += 1
        Way.clock += self.seconds * operand.targets[0].nbytes


def test_sizes_that_change_are_measured_together(world, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: Way.clock)
    # Only rank 0's clock counts.
    ways = [Way(2.0), Way(1.0 if world.rank == 0 else 5.0), Way(3.0)]
    tuner = Autotuner(world, ways, least_bytes=1000)

    def calls_after(*sizes):
        for size in sizes:
            tuner.allreduce(SimpleNamespace(targets=[np.zeros(size, np.uint8)]))
        return [way.calls for way in ways]

    assert calls_after(*range(1024, 2048, 1023 // (3 * TRIALS) + 1)) == [TRIALS] * 3
    assert calls_after(1024, 1500, 2047) == [TRIALS, TRIALS + 3, TRIALS]
    assert calls_after(2048, 999) == [TRIALS + 2, TRIALS + 3, TRIALS]
