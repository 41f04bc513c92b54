"""The monitor, asked in this process: what it says of ranks that are alone or can't be reached."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from chainermn_comm.watchdog import Limit, alone, arriving, calls, monitor, part_of, starting
from chainermn_comm.watchdog.network import Asking, Peer, serve
from chainermn_comm.watchdog.records import EVERYBODY, doing, read
from chainermn_train import dealing
from tests.support import jobs

COMMUNICATOR = (0, 1)
# A rank that has made no call yet and does something alone.
OTHER_RANK = """
import json, sys
from chainermn_comm.watchdog import alone, calls, starting
description, problem = starting._description(1)
record = calls.take((0, 1), 1, 2)
with alone("evaluate"):
    print(json.dumps(description), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def record():
    calls.area().watched = False
    made = calls.take(COMMUNICATOR, 0, 2)
    yield made
    made.release()


def watching(monkeypatch, ranks, others=(), ends_job=True):
    """A monitor of these ranks, what it says, and an item for each time that it ends them."""
    orders = {"ranks": ranks, "seconds": 2.0, "ends_job": ends_job, "silence": 20.0}
    made = monitor.Monitor({**orders, "listener": None, "mine": None, "others": list(others)})
    said, ended = [], []
    monkeypatch.setattr(made, "say", said.append)
    monkeypatch.setattr(made, "end", lambda: ended.append(True))
    return made, said, ended


def described():
    description, problem = starting._description(0)
    assert problem is None
    return description


def test_each_nodes_own_report_is_printed_when_others_cannot_be_reached(monkeypatch, record):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = {"host": "far", "addresses": ["127.0.0.1"], "port": silent.getsockname()[1]}
        far = {**where, "secret": "x", "ranks": [1]}
        watched, said, ended = watching(monkeypatch, [described()], [far])
        record.collective("allreduce", 7, nbytes=400)
        begun = time.monotonic()
        assert watched.look(begun + 2.5)
        # Its answer was waited for, though not for ever.
        assert time.monotonic() - begun < monitor.ANSWER_SECONDS + jobs.SECONDS
    (report,) = said
    assert "rank 0 (process" in report
    assert "waits in allreduce (collective call 7, 400 bytes)" in report
    assert "not heard of: 1 of the 2 ranks that take part" in report
    assert "ranks wait for others that could not be asked; rank 1 on far didn't answer" in report
    assert "in test_each_nodes_own_report" in report  # the stack
    assert ended == [True]


def test_only_machines_that_gave_no_answer_are_said_to_be_silent():
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        peers = [
            Peer(
                {
                    "host": host,
                    "ranks": [rank],
                    "addresses": ["127.0.0.1"],
                    "port": listener.getsockname()[1],
                    "secret": "x",
                }
            )
            for rank, (host, listener) in enumerate([("near", one), ("far", other)])
        ]
        work = (one, "x", lambda question: {"asked": question})
        threading.Thread(target=serve, args=work, daemon=True).start()
        asking = Asking(peers, "calls", 1.0)
        assert asking.answers() == [{"asked": "calls"}]
        assert asking.silent() == ["rank 1 on far"]


def test_work_that_a_rank_does_alone_is_no_stall_for_ten_minutes(monkeypatch, record):
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        ranks = [described(), json.loads(other.stdout.readline())]
        watched, said, ended = watching(monkeypatch, ranks)
        monkeypatch.setattr(watched, "stacks", dict)
        record.collective("gather", 1)
        start = time.monotonic()
        for seconds in range(3, 600):
            assert not watched.look(start + seconds), said
        reports = [text for text in said if "likely culprit" in text]
        assert len(reports) == 1, said
        assert "culprit: rank 1 " in reports[0]
        assert "is in no call" in reports[0]
        assert ", inside evaluate for " in reports[0]
        assert "The ranks go on waiting for it, 600 s at most." in reports[0]
        assert ended == []
        assert any(watched.look(start + seconds) for seconds in range(601, 620))
        assert "ending the job" in said[-1]
        assert ended == [True]
    finally:
        other.communicate(timeout=jobs.SECONDS)


def test_launchers_that_read_nothing_keep_the_end_waiting_once_and_not_for_each_rank(
    monkeypatch, record
):
    def in_vain(_, text, seconds):
        time.sleep(max(0.0, seconds))
        given.append(max(0.0, seconds))
        return False

    given: list[float] = []
    watched, _, _ = watching(monkeypatch, [described()] * 50)
    monkeypatch.setattr(monitor, "SAYING_SECONDS", 0.2)
    monkeypatch.setattr(monitor.processes, "write_stderr", in_vain)
    monkeypatch.setattr(monitor.processes, "write", in_vain)
    monitor.Monitor.say(watched, "words")
    assert len(given) == 50 + len(watched.launchers) + 1
    assert given[0] > 0
    assert sum(given) <= 0.2


def test_what_a_rank_is_inside_of_is_noted_until_it_leaves():
    memory = calls.area().memory

    def noted():
        found = doing(memory, time.monotonic())
        return found and (found.what, found.alone)

    assert noted() is None
    with alone("evaluate"):
        with part_of("x" * 100):
            assert noted() == ("x" * 64, False)
        assert noted() == ("evaluate", True)
    assert noted() is None


def test_the_wait_for_scattered_examples_is_noted():
    class Gate:
        def wait_until_open(self):
            seen.extend(read(calls.area().memory, time.monotonic()))

    class Comm:
        def recv(self, source, tag):
            return np.array([dealing._NONE_COMES])

    seen = []
    assert dealing._receive(Comm(), 0, Gate(), None, [], 1) is None
    waits = [call for call in seen if call.waits]
    assert [(call.operation, call.communicator) for call in waits] == [
        ("scatter_dataset", EVERYBODY)
    ]


def test_before_there_is_a_communicator_nothing_is_noted(monkeypatch):
    monkeypatch.setattr(calls, "_area", None)
    with alone("nothing"):
        pass


def test_the_first_communicators_watch_costs_no_thread_where_it_is_off():
    before = threading.active_count()
    for limit, members in ((Limit(0.0), [0, 1]), (Limit(600.0), [0])):
        with arriving(limit, members, os.abort):
            assert threading.active_count() == before
