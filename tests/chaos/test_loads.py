"""Under load memory stays flat and nothing is lost: short here, at length with `--full`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.planted import OURS

SCRIPT = Path(__file__).with_name("loads.py")
# Of the samples, the first part: imports, caches and MPI's own buffers grow then.
WARM = 0.4
# What a process's memory may move by: malloc's arenas, and 16 MiB of MPI's eager buffers.
NOISE_BYTES = 3 << 20


def samples_of(ranks, what, amount, seconds):
    """What each rank saw: a list of samples."""
    job = jobs.run(ranks, SCRIPT, what, amount, environment=OURS, seconds=seconds)
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


def check_flat(found, capsys):
    for one in found:
        grown = {name: growth(one["samples"], name) for name in ("rss", "pss", "files", "threads")}
        end = one["samples"][-1]
        with capsys.disabled():
            seconds = end["at"] - one["samples"][0]["at"]
            series = [f"{s['rss'] / 2**20:.2f}" for s in one["samples"][::4]]
            print(
                f"\nrank {one['rank']}: {one['done']:,} in {seconds:.0f} s; rss "
                f"{end['rss'] / 2**20:.1f} MiB, grown {grown['rss'] / 2**10:+.0f} KiB, pss "
                f"{grown['pss'] / 2**10:+.0f} KiB (rss meanwhile: {' '.join(series)})",
                end="",
            )
        assert grown["files"] == grown["threads"] == 0, one
        assert grown["rss"] < NOISE_BYTES, one
        assert grown["pss"] < NOISE_BYTES, one


# A leak of 100 bytes a call shows in the long run, of a few KiB in the short one.


def test_collectives_back_to_back(capsys):
    check_flat(samples_of(2, "collectives", 900, 600), capsys)


def test_communicators_made_and_freed(capsys):
    check_flat(samples_of(2, "communicators", 30, 600), capsys)


@pytest.mark.full
def test_100_000_collectives_back_to_back(capsys):
    check_flat(samples_of(2, "collectives", 100_000, 1200), capsys)


@pytest.mark.full
def test_1_000_communicators_made_and_freed(capsys):
    check_flat(samples_of(2, "communicators", 1_000, 1200), capsys)


@pytest.mark.full
def test_eight_ranks_on_two_cores_for_ten_minutes(capsys):
    check_flat(samples_of(8, "mixed", 600, 1200), capsys)
