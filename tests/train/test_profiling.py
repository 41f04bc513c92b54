"""A step's time, and what of it goes to its parts."""

from __future__ import annotations

import threading

import pytest

from chainermn_train import profiling
from tests.support.training.trainers import SimulatedTime


@pytest.fixture
def clock_time(monkeypatch):
    simulated = SimulatedTime()
    monkeypatch.setattr("time.perf_counter", simulated)
    return simulated


def test_on_a_gpu_only_some_steps_wait_for_kernels(clock_time):
    waits = []
    clock = profiling.StepClock(lambda: waits.append(clock_time.now))
    for _ in range(profiling.STEPS_PER_SAMPLE_ON_GPU + 1):
        with clock.step(), profiling.region("waiting"):
            clock_time.sleep(1)
    assert len(waits) == 2 * 4  # before and after a step, and its collective
    assert clock.times.seconds == profiling.STEPS_PER_SAMPLE_ON_GPU + 1
    assert clock.times.waiting == 2
    assert clock.times.sampled == 2


def test_what_another_thread_sends_is_no_part_of_the_step(clock_time):
    clock = profiling.StepClock()

    def send():
        # Counts once.
        with profiling.region("communication"), profiling.region("waiting"):
            clock_time.sleep(1)

    with clock.step():
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        assert clock.times.communication == 0
        send()
    send()  # outside a step
    times = clock.times
    assert times.communication == 1
    assert times.waiting == 0
    assert times.seconds == 2
