"""The pytest plugin of one rank of an MPI world: ranks agree on outcomes, and none waits forever.

A test that fails on one rank fails on all. One that outlasts its time prints every
rank's stack and ends the job.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from tests.support.plugins import checks

# Generous: two cores may be shared by four ranks and other work. It ends hangs, no
# more.
TEST_SECONDS = float(os.environ.get("CHAINERMN_TEST_SECONDS", "240"))
# All ranks start a test together; this lets each print its stack before the first one
# exits.
GRACE_SECONDS = 2.0
# Names the folder in which pytest makes temporary ones.
TEMPORARY = "PYTEST_DEBUG_TEMPROOT"
# Numbers of ranks that a world test runs on in the default tier, and in the full one.
DEFAULT_SIZES, FULL_SIZES = (2, 3), (1, 2, 3, 4)
# Of a test with more cases than this, the default tier runs each on one of its numbers.
FEW_CASES = 6
ALL_FOR_WORLDS = re.compile(
    r"^pytestmark = (\[[^]]*|)pytest\.mark\.world\b", re.MULTILINE
)


def possible_sizes(item: pytest.Item) -> set[int]:
    """The numbers of ranks on which the full tier runs this test."""
    sizes = item.get_closest_marker("sizes")
    return set(FULL_SIZES).intersection(sizes.args if sizes else FULL_SIZES)


def sizes_of(items: list[pytest.Item], full: bool) -> dict[pytest.Item, Sequence[int]]:
    """The numbers of ranks on which a tier runs each of its world tests.

    Of a test with many cases, the default tier runs each on one number, so that each
    value of each parameter is there on all numbers if it can be.
    """
    found = {item: _sizes_of(item, full) for item in items}
    if full:
        return found
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        # Those are skipped where there is none.
        if item.get_closest_marker("gpu") is None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        if len(cases) <= FEW_CASES or cases[0].get_closest_marker("ranks"):
            continue
        # A value, and a number of ranks that it was on.
        done: set[tuple[str, int]] = set()
        taken: Counter[int] = Counter()
        for item in cases:
            values = item.name.partition("[")[2].rstrip("]").split("-")
            size = max(
                found[item],
                key=lambda n: (sum((v, n) not in done for v in values), -taken[n]),
            )
            done |= {(value, size) for value in values}
            taken[size] += 1
            found[item] = (size,)
    return found


def _sizes_of(item: pytest.Item, full: bool) -> Sequence[int]:
    sizes, ranks = item.get_closest_marker("sizes"), item.get_closest_marker("ranks")
    possible = sizes.args if sizes else FULL_SIZES
    if full:
        return possible
    return [
        n for n in (ranks.args if ranks else DEFAULT_SIZES) if n in possible
    ] or possible


@functools.cache
def only_elsewhere(path: Path, world: bool) -> bool:
    """Whether a file's text says that all its tests are for worlds, or in a world, that none is."""
    text = path.read_text()
    return (
        not re.search(r"\bmark\.world\b", text)
        if world
        else bool(ALL_FOR_WORLDS.search(text))
    )


class World:
    """The pytest plugin of one rank."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()
        self.size = self.comm.size
        self.stderr = os.dup(2)  # capturing is suspended while plugins are configured
        # Pytest's reporter is about to take sys.stdout; rank 0's is enough.
        if self.comm.rank:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        # At its end pytest clears all but the last three runs' temporary folders. Of
        # four ranks one clears another's, and the link to it; who then finds that link
        # gone ends in an error.
        folder = Path(os.environ.get(TEMPORARY) or tempfile.gettempdir())
        folder /= f"pytest-{os.getuid()}-rank{self.comm.rank}"
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ[TEMPORARY] = str(folder)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        done = threading.Event()
        guard = threading.Thread(target=self._end_if_late, args=(done,), daemon=True)
        guard.start()
        try:
            return (yield)
        finally:
            done.set()
            guard.join()

    def _end_if_late(self, done: threading.Event) -> None:
        if done.wait(TEST_SECONDS):
            return
        title = (
            f"\n--- rank {self.comm.rank}: {TEST_SECONDS:g} s are over, its stacks:\n"
        )
        os.write(self.stderr, title.encode())
        faulthandler.dump_traceback(self.stderr, all_threads=True)
        time.sleep(GRACE_SECONDS)
        os._exit(124)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        mine = report.longreprtext if report.failed else None
        if mine is not None:  # said at once, since the others may never come to agree
            text = (
                f"\n--- rank {self.comm.rank}: {item.nodeid} ({report.when}):\n{mine}\n"
            )
            os.write(self.stderr, text.encode())
        views = self.comm.allgather((mine, checks.count()))
        failing = [rank for rank, (failure, _) in enumerate(views) if failure]
        if mine is None and failing:
            report.outcome = "failed"
            report.longrepr = f"failed on ranks {failing}; see their output above"
        checks.require(report, sum(count for _, count in views))
        return report
