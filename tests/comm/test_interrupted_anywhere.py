"""An exception at any bytecode of a collective call: all ranks raise, or the job ends.

Wherever a signal's handler raises on one rank, no other rank gets a wrong number or is
a call apart. Calls and places are drawn; a failure shows the seed.
"""

from __future__ import annotations

import random
import re

import pytest

from tests.comm.interrupted import MEAN_NAMES, NAMES
from tests.support.jobs.runner import run_text

SEED = 0
SCRIPT = """
import sys
from pathlib import Path
from tests.comm.interrupted import run
base, name, odd, path, *places = sys.argv[1:]
run(base, name, int(odd), Path(path), list(map(float, places)))
"""
SECONDS = 60.0  # ends a rank that waits in vain
CASES = [
    (base, name)
    for name in NAMES
    for base in MEAN_NAMES
    if base == "flat" or name.startswith(("allreduce_grad", "finalize"))
]
FEW = random.Random(SEED).sample(CASES, 8)


def interrupt(folder, ranks, case, count):
    """Interrupt calls at as many places; a job goes on with the next one where it isn't aborted."""
    draw = random.Random(f"{SEED} {ranks} {case}")
    odd = draw.randrange(ranks)
    path = folder / "place"
    places = sorted(draw.random() for _ in range(count))
    while places:
        job = run_text(ranks, SCRIPT, *case, odd, path, *places, seconds=SECONDS)
        assert path.exists(), job
        text = path.read_text()
        where = f"{case}, rank {odd} of {ranks}, bytecode {text}, seed {SEED}: {job}"
        if job.returncode == 0 and job.out.count("DONE") == ranks:
            return
        assert job.returncode == 1, where
        # Where a `with` has just ended, Python closes its generator instead.
        kinds = "InterruptedError|PeerError|GeneratorExit"
        named = rf"rank {odd} of {ranks}: uncaught ({kinds})"
        assert re.search(named, job.err), where
        del places[: int(text.split()[0]) + 1]


@pytest.mark.ci
@pytest.mark.parametrize("case", FEW, ids=" ".join)
def test_an_interrupted_call_raises_on_all_ranks_or_ends_the_job(case, tmp_path):
    interrupt(tmp_path, 2, case, 2)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_an_interrupted_call_at_many_places(case, ranks, tmp_path):
    interrupt(tmp_path, ranks, case, 7)
