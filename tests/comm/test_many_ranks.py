"""Five to eight ranks, more than worlds have: every communicator gives the mean."""

from __future__ import annotations

import pytest

from tests.support.jobs import runner
from tests.support.plugins.pairwise import in_full
from tests.support.worlds.many_ranks import CALLS, TOPOLOGIES, runs

pytestmark = pytest.mark.ci

# 4 to 12 s on two idle cores; ranks that wait in MPI take each other's time.
SECONDS = 240.0


# One number by default: each takes long on two cores, and they differ little.
@pytest.mark.parametrize(
    "ranks",
    [5, *in_full(*(n for n in TOPOLOGIES if n != 5))],
)
def test_means_are_right_and_bit_identical_over_any_topology(ranks):
    job = runner.run(ranks, "-m", "tests.support.worlds.many_ranks", seconds=SECONDS)
    assert job.returncode == 0, job
    means = str(len(runs(ranks)) * (CALLS + 1))
    assert job.out.split() == ["MEANS", means], job
