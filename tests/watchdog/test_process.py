"""The process that runs a monitor, and another one where that fails."""

from __future__ import annotations

import json
import os
import socket
from types import SimpleNamespace

import pytest

from chainermn_comm.watchdog.monitor import process
from tests.support.watchdog.records import MonitoredRank, description
from tests.support.watchdog.watched_ranks import job_of, outside, ranks


def test_a_monitor_that_fails_is_started_again_and_at_last_the_ranks_are_told(
    monkeypatch, capfd
):
    class Failing:
        def __init__(self, *_):
            raise KeyError("planted")

    monkeypatch.setattr(process, "Monitor", Failing)
    process.supervise({}, [MonitoredRank(description(0))])
    told = capfd.readouterr().err.splitlines()
    assert len(told) == process.ATTEMPTS + 1
    assert all("failed: KeyError: 'planted'" in line for line in told[:-1])
    assert told[-1].startswith("ChainerMN: the process that watches the ranks on ")
    assert told[-1].endswith("no call will be reported any more.")


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_monitor_answers_its_own_user_alone(monkeypatch, is_ours):
    asked = []

    def everyone(what, _):
        asked.append(what)
        return job_of(ranks(outside(0)), ["rank 1 on far"])

    monitor = SimpleNamespace(everyone=everyone)
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as asker,
    ):
        listener.bind(f"\0chainermn test {os.getpid()} {is_ours}")
        listener.listen()
        listener.setblocking(False)
        process.answer(monitor, listener)  # nobody asks
        assert asked == []
        asker.connect(listener.getsockname())
        asker.sendall(b"stacks")
        if not is_ours:
            monkeypatch.setattr(process.os, "geteuid", lambda: os.getuid() + 1)
        process.answer(monitor, listener)
        if not is_ours:
            with pytest.raises(ConnectionResetError):
                asker.recv(1)
            assert asked == []
            return
        found = json.load(asker.makefile("rb"))
    assert asked == ["stacks"]
    assert [rank["world"] for rank in found["ranks"]] == [0]
    assert found["unseen"] == ["rank 1 on far"]


def test_who_asks_and_says_nothing_keeps_a_monitor_for_a_moment(monkeypatch):
    monkeypatch.setattr(process, "SEND_SECONDS", 0.05)
    asked = []
    monitor = SimpleNamespace(everyone=lambda *what: asked.append(what))
    with (
        socket.socket(socket.AF_UNIX) as listener,
        socket.socket(socket.AF_UNIX) as asker,
    ):
        listener.bind(f"\0chainermn test {os.getpid()} silent")
        listener.listen()
        asker.connect(listener.getsockname())
        process.answer(monitor, listener)
        assert asker.recv(1) == b""
    assert asked == []
