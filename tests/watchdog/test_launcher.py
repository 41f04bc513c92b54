"""Open MPI's daemon is ended when a cut link has left it alone, and never before."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from chainermn_comm.watchdog.launcher import Launcher
from tests.support.processes import is_running, soon

# It starts a rank, says its number, waits for its end, and then for a word that doesn't come. $0 is
# what Open MPI has in the daemon's command line, $1 where its folder is.
DAEMON = """
mkdir "$1/prted.$$"
PMIX_SERVER_TMPDIR="$1/prted.$$" sleep 1000 &
echo $!
wait
read word
"""
ONE_JOBS = "prterun-alpha-120@0"
Daemon = subprocess.Popen


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[[str, str], tuple[Daemon, int]]]:
    """Starts a daemon of that name for those jobs; gives it, and its rank's number."""
    started: list[tuple[Daemon, int]] = []

    def start_daemon(name: str, jobs: str) -> tuple[Daemon, int]:
        daemon = subprocess.Popen(
            [name, "-c", DAEMON, jobs, tmp_path],
            executable="/bin/sh",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert daemon.stdout is not None
        rank = int(daemon.stdout.readline())
        started.append((daemon, rank))
        assert soon(lambda: "PMIX_SERVER_TMPDIR" in psutil.Process(rank).environ())
        return daemon, rank

    yield start_daemon
    for daemon, _ in started:
        if daemon.poll() is None:
            for child in psutil.Process(daemon.pid).children():
                child.kill()
            daemon.kill()
        daemon.communicate()


def end_rank(daemon: Daemon, rank: int) -> None:
    os.kill(rank, signal.SIGKILL)
    assert soon(lambda: not psutil.Process(daemon.pid).children())


def test_it_is_ended_once_its_ranks_are_and_its_folder_goes(start_daemon, tmp_path):
    daemon, rank = start_daemon("/usr/bin/prted", ONE_JOBS)
    launcher = Launcher(rank)
    launcher.end(1.0)
    assert launcher.is_left()  # its rank lives
    assert not launcher.remove_folder()
    end_rank(daemon, rank)
    assert launcher.is_left()
    launcher.end(1.0)
    assert not launcher.is_left()
    assert soon(launcher.remove_folder)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "jobs"),
    [("/usr/bin/prted", "prte-alpha-120@0"), ("/usr/sbin/slurmstepd", ONE_JOBS)],
    ids=["many jobs'", "another launcher's"],
)
def test_a_launcher_of_a_site_is_left_alone(name, jobs, start_daemon):
    daemon, rank = start_daemon(name, jobs)
    launcher = Launcher(rank)
    end_rank(daemon, rank)
    launcher.end(1.0)
    assert not launcher.is_left()
    assert not launcher.remove_folder()
    assert is_running(daemon.pid)
