"""Under load memory stays flat and nothing is lost: short here, at length with `--full`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.planted import OURS

SCRIPT = Path(__file__).with_name("loads.py")
SECONDS = 1200.0  # ends a hang, no more
# Of the samples, the first part: imports, caches and MPI's own buffers grow then.
WARM = 0.4
# What a process's memory may move by: malloc's arenas, and 16 MiB of MPI's eager buffers.
NOISE_BYTES = 3 << 20


def samples_of(ranks, what, amount):
    """What each rank saw: a list of samples."""
    job = jobs.run(ranks, SCRIPT, what, amount, environment=OURS, seconds=SECONDS)
    assert job.returncode == 0, job
    (line,) = (line for line in job.out.splitlines() if line.startswith("LOADED "))
    found = json.loads(line.partition(" ")[2])
    assert len(found) == ranks
    return found


def growth(samples, name):
    """How much more there is at the end than after warming up: medians, so that no peak counts."""
    warm = samples[int(len(samples) * WARM) :]
    part = max(1, len(warm) // 3)
    return statistics.median(s[name] for s in warm[-part:]) - statistics.median(
        s[name] for s in warm[:part]
    )


def check_flat(found):
    for one in found:
        grown = {name: growth(one["samples"], name) for name in ("rss", "pss", "files", "threads")}
        assert grown["files"] == grown["threads"] == 0, one
        assert grown["rss"] < NOISE_BYTES, one
        assert grown["pss"] < NOISE_BYTES, one


# A leak of 100 bytes a call shows in the long run, of a few KiB in the short one.


@pytest.mark.parametrize(
    ("ranks", "what", "amount"),
    [
        (2, "collectives", 900),
        (2, "communicators", 30),
        pytest.param(2, "collectives", 100_000, marks=pytest.mark.full),
        pytest.param(2, "communicators", 1_000, marks=pytest.mark.full),
        pytest.param(8, "mixed", 600, marks=pytest.mark.full),  # seconds
    ],
)
def test_memory_files_and_threads_stay_flat_under_load(ranks, what, amount):
    check_flat(samples_of(ranks, what, amount))
