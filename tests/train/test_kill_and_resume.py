"""A run that is killed with SIGKILL, wherever, and started again ends with the same bits.

A rank is killed once in each part of a run; test_checkpoint_crashes.py has every moment at which
a save changes files, without the jobs.
"""

from __future__ import annotations

import functools
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import jobs

SCRIPT = Path(__file__).parents[1] / "support" / "killed.py"
STOP = 21  # a checkpoint is saved at every third iteration
LONG_STOP = 90

# Where a rank is killed, and the iteration that the next job goes on from, chained: each job is
# killed in turn. Only the newest generation is kept, so each save collects the one before.
CHAIN: list[tuple[dict[str, Any], int]] = [
    ({"rank": 0, "at": "write", "iteration": 6}, 3),
    ({"rank": 1, "at": "replace", "path": "run.1.9.new", "after": True}, 6),
    ({"rank": 0, "at": "replace", "path": "run.commit.9", "after": True}, 9),
    ({"rank": 0, "at": "unlink", "path": "run.commit.9", "after": True}, 12),
    ({"rank": 1, "at": "mean", "iteration": 14}, 12),
    ({"rank": 0, "at": "unlink", "path": f"run.commit.{STOP}"}, STOP),
]


@dataclass(frozen=True)
class Kind:
    """What is the same in all jobs of a test."""

    ranks: int = 2
    communicator: str = "flat"
    stop: int = STOP
    background: bool = False

    def run(self, out: Path, kill: dict[str, Any] | None) -> jobs.Job:
        options = {**asdict(self), "out": str(out), "kill": kill}
        return jobs.run(self.ranks, SCRIPT, json.dumps(options), seconds=120)

    def digests(self, done: jobs.Job) -> dict[str, str]:
        """What each rank ended with."""
        assert done.returncode == 0, done
        lines = [line.split() for line in done.out.splitlines() if line.startswith("END ")]
        found = {rank: digest for _, rank, digest in lines}
        assert len(found) == self.ranks, done
        return found


def begin_of(done: jobs.Job) -> int:
    return int(done.out.split("BEGIN ")[1].split()[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The digests of a run of a kind that was never killed."""

    def run(kind: Kind) -> dict[str, str]:
        return kind.digests(kind.run(tmp_path_factory.mktemp("whole"), None))

    return functools.cache(run)


@pytest.mark.parametrize(
    "kind", [Kind(), pytest.param(Kind(4, "two_dimensional"), marks=pytest.mark.full)], ids=str
)
def test_killed_in_each_part_of_a_run(tmp_path, whole, kind):
    begin = 0
    for kill, next_begin in CHAIN:
        killed = kind.run(tmp_path, kill)
        assert killed.returncode not in (0, None), (kill, killed)
        assert "END" not in killed.out
        assert begin_of(killed) == begin, (kill, killed)
        begin = next_begin
    last = kind.run(tmp_path, None)
    assert begin_of(last) == begin, last
    assert {path.name for path in tmp_path.iterdir()} <= {"log"}  # and nothing half written
    assert kind.digests(last) == whole(replace(kind, background=False))


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        (Kind(), 1),
        pytest.param(Kind(stop=LONG_STOP), 15, marks=pytest.mark.full),
        pytest.param(Kind(stop=LONG_STOP, background=True), 15, marks=pytest.mark.full),
        pytest.param(Kind(3, "hierarchical", LONG_STOP), 8, marks=pytest.mark.full),
        pytest.param(Kind(4, "hierarchical", LONG_STOP, True), 8, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_killed_at_random_moments(tmp_path, whole, kind, moments):
    """Kill a random rank at a random time of a random step (a step may save), again and again."""
    draw, begin = random.Random(2 + kind.background), 0
    for number in range(moments):
        # In the share of the run that is this kill's: the run must get on between kills. By its
        # seventh step one checkpoint is there, also where they are written in the background.
        share = (kind.stop - 10) / moments
        first = max(begin + 1, 7, int(number * share))
        kill = {
            "at": "moment",
            "rank": draw.randrange(kind.ranks),
            "iteration": draw.randint(first, max(first, int((number + 1) * share))),
            "seconds": draw.uniform(0, 0.03),
        }
        killed = kind.run(tmp_path, kill)
        assert killed.returncode not in (0, None), (kill, killed)
        assert begin_of(killed) >= begin, (kill, killed)
        begin = begin_of(killed)
    last = kind.run(tmp_path, None)
    assert begin_of(last) >= max(begin, 1)
    assert kind.digests(last) == whole(replace(kind, background=False))
