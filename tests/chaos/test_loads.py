"""Under load memory stays flat and nothing is lost: short here, at length with `--full`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.jobs import runner

SCRIPT = Path(__file__).with_name("loads.py")
SECONDS = 1200.0  # ends a hang, no more
# What a process's memory may grow by: malloc's arenas, and 16 MiB of MPI's eager
# buffers.
NOISE_BYTES = 3 << 20


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        # A leak of 100 bytes a call shows in the long run, of a few KiB in the short
        # one.
        (2, 2000),
        pytest.param(2, 100_000, marks=pytest.mark.full),
        pytest.param(8, 10_000, marks=pytest.mark.full),
    ],
)
def test_memory_files_and_threads_stay_flat_under_load(ranks, count):
    job = runner.run(ranks, SCRIPT, count, seconds=SECONDS)
    assert job.returncode == 0, job
    (line,) = re.findall("^HELD (.*)$", job.out, re.M)
    for warm, last in json.loads(line):
        assert last.pop("bytes") - warm.pop("bytes") < NOISE_BYTES, job
        assert last == warm, job
