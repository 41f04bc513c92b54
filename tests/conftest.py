"""Runs test bodies on every rank of an MPI world, and makes the ranks agree on each outcome.

`pytest` runs the tests without the marker `world`; `mpiexec -n N pytest --world` those with
it. A test that fails on one rank fails on all. One that outlasts its time prints every rank's
stack and ends the job.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Generator

import pytest

# Generous: two cores may be shared by four ranks and other work. It ends hangs, no more.
TEST_SECONDS = float(os.environ.get("CHAINERMN_TEST_SECONDS", "120"))
# All ranks start a test together; this lets each print its stack before the first one exits.
GRACE_SECONDS = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--world", action="store_true", help="run the tests marked `world`")
    parser.addoption("--slow", action="store_true", help="run the tests marked `slow` too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--world"):
        config.pluginmanager.register(World(config), "chainermn-world")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    world = config.getoption("--world")
    size = config.pluginmanager.getplugin("chainermn-world").size if world else 1

    def wanted(item: pytest.Item) -> bool:
        sizes = item.get_closest_marker("sizes")
        return (
            (item.get_closest_marker("world") is not None) == world
            and (sizes is None or size in sizes.args)
            and (config.getoption("--slow") or item.get_closest_marker("slow") is None)
        )

    unwanted = [item for item in items if not wanted(item)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if wanted(item)]
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _group(item: pytest.Item) -> str:
    """Tests of one group run one after the other: those that share what takes long to make."""
    folder = item.path.parent.name
    return folder if folder == "packaging" else f"{folder}/{item.path.name}"


class World:
    """The pytest plugin of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self.config = config
        self.comm = MPI.COMM_WORLD.Dup()
        self.size = self.comm.size
        self.stderr = os.dup(2)  # capturing is suspended while plugins are configured
        if self.comm.rank:  # pytest's reporter is about to take sys.stdout; rank 0's is enough
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115

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
        title = f"\n--- rank {self.comm.rank}: {TEST_SECONDS:g} s are over, its stacks:\n"
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
            text = f"\n--- rank {self.comm.rank}: {item.nodeid} ({report.when}):\n{mine}\n"
            os.write(self.stderr, text.encode())
        failures = self.comm.allgather(mine)
        if mine is None and any(failures):
            ranks = [rank for rank, failure in enumerate(failures) if failure]
            report.outcome = "failed"
            report.longrepr = f"failed on ranks {ranks}; see their output above"
        return report


@pytest.fixture
def world():
    """MPI.COMM_WORLD."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
