"""What is known of processes where the system refuses to say more."""

from __future__ import annotations

import builtins
import errno
import os
import signal
import subprocess
import sys

import pytest

from chainermn_comm.watchdog import processes
from chainermn_comm.watchdog.processes import GONE, RUNNING
from tests.support.jobs.processes import is_gone, soon


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_a_process_is_not_gone_because_it_can_not_be_looked_at(monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(builtins, "open", refuse)
    found = processes.state(os.getpid())
    monkeypatch.undo()
    assert found == RUNNING


def test_a_process_is_gone_once_it_has_ended():
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as child:
        assert processes.state(child.pid) == RUNNING
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert processes.state(child.pid) == GONE  # nobody has waited for it
    assert processes.state(child.pid) == GONE


# Open MPI's daemon starts a rank, says its number, waits for its end, and then for a
# word that doesn't come.
DAEMON = """
sleep 1000 &
echo $!
wait
read word
"""
ONE_JOBS = "prterun-alpha-120@0"


@pytest.mark.parametrize(
    ("name", "job", "is_ended"),
    [
        ("/usr/bin/prted", ONE_JOBS, True),
        ("/usr/bin/prted", "prte-alpha-120@0", False),  # it serves many jobs
        ("/usr/sbin/slurmstepd", ONE_JOBS, False),
    ],
)
def test_a_daemon_that_was_left_alone_is_ended_after_its_ranks(
    name, job, is_ended, monkeypatch
):
    monkeypatch.setattr(processes, "DAEMON_SECONDS", 0.1)
    with subprocess.Popen(
        [name, "-c", DAEMON, job],
        executable="/bin/sh",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as daemon:
        rank = int(daemon.stdout.readline())
        processes.end_daemon(daemon.pid)
        assert processes.state(daemon.pid) == RUNNING  # its rank lives
        os.kill(rank, signal.SIGKILL)
        assert soon(lambda: is_gone(rank))
        processes.end_daemon(daemon.pid)
        assert (processes.state(daemon.pid) == GONE) == is_ended
        daemon.kill()
