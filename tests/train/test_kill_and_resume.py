"""A run that is killed with SIGKILL, wherever, and started again ends with the same bits.

test_checkpoint_crashes.py has every change of the files, without the jobs; so the full
tier has the jobs that are killed at each of these.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import killed, runner

pytestmark = pytest.mark.ci

SCRIPT = Path(killed.__file__)
STOP = 21  # a checkpoint is saved at every third iteration
LONG_STOP = 90
FULL = pytest.mark.full

# Where a rank is killed, and the iteration that the next job goes on from, chained:
# each job is killed in turn. Only the newest generation is kept, so each save collects
# the one before.
Chain = list[tuple[dict[str, Any], int]]
CHAINS: dict[str, Chain] = {
    "writing": [
        ({"rank": 1, "at": "save", "iteration": 6}, 3),
        ({"rank": 0, "at": "write", "iteration": 9, "arrays": 3}, 6),
        ({"rank": 1, "at": "write", "iteration": 9, "arrays": 0}, 6),
        ({"rank": 1, "at": "sync", "iteration": 12}, 9),
    ],
    "naming and collecting": [
        ({"rank": 1, "at": "replace", "path": "run.1.3"}, 0),
        ({"rank": 1, "at": "replace", "path": "run.1.6"}, 3),
        ({"rank": 0, "at": "unlink", "path": "run.0.3"}, 6),
        ({"rank": 0, "at": "unlink", "path": "run.0.9", "after": True}, 12),
        ({"rank": 1, "at": "unlink", "path": "run.1.12"}, 15),
        ({"rank": 1, "at": "unlink", "path": "run.1.15", "after": True}, 18),
    ],
    "a step and a collective": [
        ({"rank": 0, "at": "step", "iteration": 5}, 3),
        ({"rank": 1, "at": "mean", "iteration": 8}, 6),
        ({"rank": 0, "at": "mean", "iteration": 13}, 12),
    ],
}
# Killed while the only generation is being replaced: it stays.
AGAIN = [
    ({"rank": 1, "at": "replace", "path": "run.1.3-2"}, 3),
    ({"rank": 0, "at": "replace", "path": "run.0.6-2"}, 6),
    ({"rank": 1, "at": "unlink", "path": "run.1.9"}, 9),
]
BACKGROUND = [
    ({"rank": 0, "at": "write", "iteration": 6, "arrays": 3}, 3),
    ({"rank": 1, "at": "replace", "path": "run.1.9"}, 6),
    ({"rank": 1, "at": "unlink", "path": "run.1.12"}, 15),
]


@dataclass(frozen=True)
class Kind:
    """What is the same in all jobs of a test."""

    ranks: int = 2
    communicator: str = "flat"
    stop: int = STOP
    background: bool = False
    again: bool = False

    def run(self, out: Path, kill: dict[str, Any] | None) -> runner.Job:
        options = {**asdict(self), "out": str(out), "kill": kill}
        return runner.run(self.ranks, SCRIPT, json.dumps(options))

    def digests(self, done: runner.Job) -> dict[str, str]:
        """What each rank ended with."""
        assert done.returncode == 0, done
        lines = [
            line.split() for line in done.out.splitlines() if line.startswith("END ")
        ]
        found = {rank: digest for _, rank, digest in lines}
        assert len(found) == self.ranks, done
        return found


def begin_of(done: runner.Job) -> int:
    return int(done.out.split("BEGIN ")[1].split()[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The digests of runs that were never killed, by their kind."""
    found = {}

    def run(kind: Kind) -> dict[str, str]:
        kind = replace(kind, background=False, again=False)
        if kind not in found:
            found[kind] = kind.digests(kind.run(tmp_path_factory.mktemp("whole"), None))
        return found[kind]

    return run


def check_chain(out: Path, chain: Chain, kind: Kind) -> dict[str, str]:
    begin = 0
    for kill, next_begin in chain:
        killed = kind.run(out, kill)
        assert killed.returncode not in (0, None), (kill, killed)
        assert "END" not in killed.out
        assert begin_of(killed) == begin, (kill, killed)
        begin = next_begin
    last = kind.run(out, None)
    assert begin_of(last) == begin, last
    left = {path.name for path in out.iterdir()}
    # Nor is anything of ours left half written: Chainer's report may be.
    assert not [name for name in left if not name.startswith("log")], left
    return kind.digests(last)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("writing", "a step and a collective") else FULL
        )
        for name in CHAINS
    ],
)
def test_killed_at_each_point_of(name, tmp_path, whole):
    assert check_chain(tmp_path, CHAINS[name], Kind()) == whole(Kind())


@pytest.mark.parametrize(
    ("chain", "kind"),
    [
        pytest.param(AGAIN, Kind(again=True), marks=FULL),
        (BACKGROUND, Kind(background=True)),
    ],
)
def test_killed_while_replacing_or_in_the_background(tmp_path, whole, chain, kind):
    assert check_chain(tmp_path, chain, kind) == whole(kind)


def check_moments(out: Path, seed: int, moments: int, kind: Kind) -> dict[str, str]:
    """Kill a random rank at a random time of a random step (a step may save), again and again.

    Drawn by a seed, so that a failure is seen again.
    """
    draw = random.Random(seed)
    begin = 0
    for number in range(moments):
        # In the share of the run that is this kill's: the run must get on between
        # kills. By its seventh step one checkpoint is there, also where they are
        # written in the background.
        share = (kind.stop - 10) / moments
        first = max(begin + 1, 7, int(number * share))
        kill = {
            "at": "moment",
            "rank": draw.randrange(kind.ranks),
            "iteration": draw.randint(first, max(first, int((number + 1) * share))),
            "seconds": draw.uniform(0, 0.03),
        }
        killed = kind.run(out, kill)
        assert killed.returncode not in (0, None), (kill, killed)
        assert begin_of(killed) >= begin, (kill, killed)
        begin = begin_of(killed)
    last = kind.run(out, None)
    assert begin_of(last) >= max(begin, 1)
    return kind.digests(last)


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        (Kind(), 1),
        *(
            pytest.param(kind, moments, marks=pytest.mark.full)
            for kind, moments in [
                (Kind(stop=LONG_STOP), 15),
                (Kind(stop=LONG_STOP, background=True), 15),
                (Kind(3, "hierarchical", LONG_STOP), 8),
                (Kind(4, "hierarchical", LONG_STOP, background=True), 8),
            ]
        ),
    ],
    ids=str,
)
def test_killed_at_random_moments(tmp_path, whole, kind, moments):
    assert check_moments(tmp_path, 2 + kind.background, moments, kind) == whole(kind)
