"""The pytest plugin of one rank of an MPI world: ranks agree on outcomes, and none waits forever.

A test that fails on one rank fails on all. One that outlasts its time prints every
rank's stack and ends the job.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from collections.abc import Generator
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


class World:
    """The pytest plugin of one rank."""

    def __init__(self):
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()
        self.size = self.comm.size
        self.stderr = os.dup(2)  # capturing is suspended while plugins are configured
        # pytest's reporter is about to take sys.stdout; rank 0's is enough.
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

    def _end_if_late(self, done: threading.Event):
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
        mine = None
        if report.failed:
            mine = report.longreprtext
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
