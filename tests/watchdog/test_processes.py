"""What is known of processes where the system refuses to say more."""

from __future__ import annotations

import builtins
import errno
import os
import subprocess
import sys

import pytest

from chainermn_comm.watchdog import processes
from chainermn_comm.watchdog.processes import GONE, RUNNING


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
