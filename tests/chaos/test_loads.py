"""Under load memory stays flat and nothing is lost: short here, at length with `--full`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.support.jobs import runner

SCRIPT = Path(__file__).with_name("loads.py")
SECONDS = 1200.0  # ends a hang, no more
# Of the samples, the first part: imports, caches and MPI's own buffers grow then.
WARM = 0.4
# What a process's memory may move by: malloc's arenas, and 16 MiB of MPI's eager
# buffers.
NOISE_BYTES = 3 << 20


def growth(samples, name):
    """How much more there is at the end than after warming up: medians, so that no peak counts."""
    warm = [sample[name] for sample in samples[int(len(samples) * WARM) :]]
    part = max(1, len(warm) // 3)
    return statistics.median(warm[-part:]) - statistics.median(warm[:part])


@pytest.mark.parametrize(
    ("ranks", "load", "count"),
    [
        # A leak of 100 bytes a call shows in the long run, of a few KiB in the short
        # one.
        (2, "collectives", 900),
        (2, "communicators", 30),
        pytest.param(2, "collectives", 100_000, marks=pytest.mark.full),
        pytest.param(2, "communicators", 1_000, marks=pytest.mark.full),
        pytest.param(8, "mixed", 10_000, marks=pytest.mark.full),
    ],
)
def test_memory_files_and_threads_stay_flat_under_load(ranks, load, count):
    job = runner.run(ranks, SCRIPT, load, count, seconds=SECONDS)
    assert job.returncode == 0, job
    (line,) = (line for line in job.out.splitlines() if line.startswith("LOADED "))
    found = json.loads(line.partition(" ")[2])
    assert len(found) == ranks
    for samples in found:
        assert growth(samples, "fd") == growth(samples, "task") == 0, samples
        assert growth(samples, "bytes") < NOISE_BYTES, samples
