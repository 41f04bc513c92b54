"""A run that is killed with SIGKILL, wherever, and started again ends with the same bits."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from . import jobs

SCRIPT = Path(__file__).with_name("killed.py")
RANKS = 2
STOP = 21  # a checkpoint is saved at every third iteration
LONG_STOP = 90

# Where a rank is killed, and the iteration that the next job goes on from, chained: each job is
# killed in turn. Only the newest generation is kept, so each save collects the one before.
CHAINS: dict[str, list[tuple[dict[str, Any], int]]] = {
    "writing": [
        ({"rank": 1, "at": "save", "iteration": 6}, 3),
        ({"rank": 0, "at": "write", "iteration": 9}, 6),
        ({"rank": 1, "at": "write", "iteration": 9, "arrays": 0}, 6),
        ({"rank": 1, "at": "sync", "iteration": 12}, 9),
    ],
    "naming and committing": [
        ({"rank": 1, "at": "replace", "path": "run.1.3"}, 0),
        ({"rank": 0, "at": "replace", "path": "run.0.3", "after": True}, 0),
        ({"rank": 1, "at": "replace", "path": "run.1.6", "after": True}, 3),
        ({"rank": 0, "at": "replace", "path": "run.commit.9"}, 6),
        ({"rank": 0, "at": "replace", "path": "run.commit.12", "after": True}, 12),
    ],
    "collecting": [
        ({"rank": 0, "at": "unlink", "path": "run.commit.3"}, 6),
        ({"rank": 0, "at": "unlink", "path": "run.commit.6", "after": True}, 9),
        ({"rank": 1, "at": "unlink", "path": "run.1.9"}, 12),
        ({"rank": 0, "at": "unlink", "path": "run.0.12", "after": True}, 15),
    ],
    "sweeping, and cleaning up at the end": [
        ({"rank": 1, "at": "replace", "path": "run.1.9"}, 6),
        ({"rank": 0, "at": "replace", "path": "run.0.12", "after": True}, 9),
        ({"rank": 0, "at": "unlink", "path": f"run.commit.{STOP}"}, STOP),
        ({"rank": 1, "at": "unlink", "path": f"run.1.{STOP}"}, 0),
    ],
    "a step and a collective": [
        ({"rank": 0, "at": "step", "iteration": 5}, 3),
        ({"rank": 1, "at": "mean", "iteration": 8}, 6),
        ({"rank": 0, "at": "mean", "iteration": 13}, 12),
    ],
}
# Killed while a generation is being replaced, the only one there is: it stays, old or new.
AGAIN = [
    ({"rank": 1, "at": "replace", "path": "run.1.3.new"}, 3),
    ({"rank": 0, "at": "replace", "path": "run.0.6.new", "after": True}, 6),
    ({"rank": 0, "at": "replace", "path": "run.commit.9", "time": 2}, 9),
    ({"rank": 0, "at": "replace", "path": "run.commit.12", "time": 2, "after": True}, 12),
    ({"rank": 1, "at": "replace", "path": "run.1.15", "time": 2}, 15),
    ({"rank": 0, "at": "replace", "path": "run.0.18", "time": 2, "after": True}, 18),
]
# What was saved last is committed with the next save.
BACKGROUND = [
    ({"rank": 0, "at": "write", "iteration": 6}, 3),
    ({"rank": 1, "at": "replace", "path": "run.1.9"}, 6),
    ({"rank": 0, "at": "replace", "path": "run.commit.9"}, 6),
    ({"rank": 1, "at": "unlink", "path": "run.1.9"}, 12),
]


def job(
    out: Path,
    kill: dict[str, Any] | None,
    stop: int = STOP,
    background: bool = False,
    again: bool = False,
) -> Any:
    options = {"out": str(out), "stop": stop, "background": background, "kill": kill}
    options["again"] = again
    return jobs.run(RANKS, SCRIPT, json.dumps(options), seconds=120)


def begin_of(done: jobs.Job) -> int:
    return int(done.out.split("BEGIN ")[1].split()[0])


def digests(done: jobs.Job) -> dict[str, str]:
    """What each rank ended with."""
    assert done.returncode == 0, done
    lines = [line.split() for line in done.out.splitlines() if line.startswith("END ")]
    found = {rank: digest for _, rank, digest in lines}
    assert len(found) == RANKS, done
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The digests of runs that were never killed, by their length."""
    found = {}

    def run(stop: int) -> dict[str, str]:
        if stop not in found:
            found[stop] = digests(job(tmp_path_factory.mktemp("whole"), None, stop))
        return found[stop]

    return run


def check_chain(out: Path, chain: list[tuple[dict[str, Any], int]], **options: bool) -> Any:
    begin = 0
    for kill, next_begin in chain:
        killed = job(out, kill, **options)
        assert killed.returncode not in (0, None), (kill, killed)
        assert "END" not in killed.out
        assert begin_of(killed) == begin, (kill, killed)
        begin = next_begin
    last = job(out, None, **options)
    assert begin_of(last) == begin, last
    assert {path.name for path in out.iterdir()} <= {"log"}  # nor is anything left half written
    return digests(last)


@pytest.mark.parametrize("name", CHAINS)
def test_killed_at_each_point_of(name, tmp_path, whole):
    assert check_chain(tmp_path, CHAINS[name]) == whole(STOP)


def test_killed_while_replacing_the_only_generation(tmp_path, whole):
    assert check_chain(tmp_path, AGAIN, again=True) == whole(STOP)


def test_killed_while_writing_in_the_background(tmp_path, whole):
    assert check_chain(tmp_path, BACKGROUND, background=True) == whole(STOP)


def check_moments(out: Path, seed: int, moments: int, background: bool) -> dict[str, str]:
    """Kill a random rank at a random time of a random step (a step may save), again and again."""
    draw = random.Random(seed)
    begin = 0
    for number in range(moments):
        # In the share of the run that is this kill's: the run must get on between kills.
        first = max(begin + 1, number * (LONG_STOP - 10) // moments)
        kill = {
            "at": "moment",
            "rank": draw.randrange(RANKS),
            "iteration": draw.randint(
                first, max(first, (number + 1) * (LONG_STOP - 10) // moments)
            ),
            "seconds": draw.uniform(0, 0.03),
        }
        killed = job(out, kill, LONG_STOP, background)
        assert killed.returncode not in (0, None), (kill, killed)
        assert begin_of(killed) >= begin, (kill, killed)
        begin = begin_of(killed)
    last = job(out, None, LONG_STOP, background)
    assert begin_of(last) >= begin > 0
    return digests(last)


def test_killed_at_random_moments(tmp_path, whole):
    assert check_moments(tmp_path, 1, 3, False) == whole(LONG_STOP)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_killed_at_many_random_moments(tmp_path, whole, background):
    assert check_moments(tmp_path, 2 + background, 15, background) == whole(LONG_STOP)
