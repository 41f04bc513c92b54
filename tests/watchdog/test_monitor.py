"""The monitor, asked in this process: what it says of ranks that are alone or can't be reached."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from chainermn_comm.watchdog import monitor
from tests.support import events, jobs
from tests.support.explained import explained
from tests.support.watchdog import clock, description, record

COMMUNICATOR = (0, 1)
# A rank that does something alone, after a call or before the first.
OTHER_RANK = """
import json, sys
from chainermn_comm.watchdog import alone
from tests.support.watchdog import description, record
described = description(int(sys.argv[1]))
noted = record((0, 1), int(sys.argv[1]), 3)
if sys.argv[2] == "after a call":
    noted.collective("allreduce", 4, nbytes=80)
    noted.leave()
with alone("evaluate"):
    print(json.dumps(described), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def mine():
    """What this process notes of its calls, as rank 0."""
    made = record(COMMUNICATOR, 0, 2)
    yield made
    made.release()


@pytest.fixture
def start_rank() -> Iterator:
    """Starts another rank; its process, and what the monitor must know of it."""
    started = []

    def start_rank(world, when="before any"):
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER_RANK, str(world), when],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=jobs.variables(),
        )
        started.append(process)
        return process, json.loads(process.stdout.readline())  # type: ignore[union-attr]

    yield start_rank
    for process in started:
        process.communicate()


def watching(monkeypatch, ranks, others=(), ends_job=True):
    """A monitor of these ranks, what it says, an item for each time that it ends them, events."""
    orders = {"ranks": ranks, "seconds": 2.0, "ends_job": ends_job, "silence": 20.0}
    orders["launch"] = events.LAUNCH
    made = monitor.Monitor({**orders, "listener": None, "mine": None, "others": list(others)})
    said, ended, told = [], [], []

    def say(text, event=()):
        said.append(text)
        told.extend(event)

    monkeypatch.setattr(made, "say", say)
    monkeypatch.setattr(made, "end", lambda: ended.append(True))
    return made, said, ended, told


def test_each_nodes_own_report_is_printed_when_others_cannot_be_reached(monkeypatch, mine):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = {"host": "far", "addresses": ["127.0.0.1"], "port": silent.getsockname()[1]}
        far = {**where, "secret": "x", "ranks": [1]}
        watched, said, ended, told = watching(monkeypatch, [description(0)], [far])
        mine.collective("allreduce", 7, nbytes=400)
        assert watched.look(clock() + 2.5)
    (report,) = said
    assert "rank 0 (process" in report
    assert "waits in allreduce (collective call 7, 400 bytes)" in report
    assert "not heard of: 1 of the 2 ranks that take part" in report
    assert "ranks wait for others that could not be asked; rank 1 on far didn't answer" in report
    # Of which, where other tests have left threads, the longest are cut.
    assert "Stacks of rank 0, innermost call first:\n" in report
    assert ended == [True]
    reason = events.the_only("watchdog_abort", b"".join(told).decode())["reason"]
    assert reason.startswith("ranks wait for others that could not be asked")


def test_work_that_a_rank_does_alone_is_no_stall_for_ten_minutes(monkeypatch, mine, start_rank):
    watched, said, ended, _ = watching(monkeypatch, [description(0), start_rank(1)[1]])
    monkeypatch.setattr(watched, "stacks", dict)
    mine.collective("gather", 1)
    begun = clock()
    for seconds in range(3, 600):
        assert not watched.look(begun + seconds), said
    reports = [text for text in said if "likely culprit" in text]
    assert len(reports) == 1, said
    assert "culprit: rank 1 " in reports[0]
    assert "is in no call" in reports[0]
    assert ", inside evaluate for " in reports[0]
    assert "The ranks go on waiting for it, 600 s at most." in reports[0]
    assert ended == []
    assert any(watched.look(begun + seconds) for seconds in range(601, 620))
    assert "ending the job" in said[-1]
    assert ended == [True]


@pytest.mark.parametrize("ends_job", [False, True])
def test_a_machine_that_is_silent_ends_the_job_only_where_a_time_out_was_set(monkeypatch, ends_job):
    where = {"host": "far", "addresses": [], "port": 0, "secret": "x", "ranks": [1]}
    watched, said, ended, told = watching(monkeypatch, [description(0)], [where], ends_job)
    watched.others[0].heard = clock()
    assert not watched.look_at_next(clock() + 19)
    assert (said, ended) == ([], [])
    for turn in range(2):
        assert watched.look_at_next(clock() + 21 + turn) == ends_job
    assert len(ended) == 2 * ends_job
    if not ends_job:
        (text,) = said  # once, until it is heard again
        assert "nothing was heard of far for 20.0 s" in text
        assert "The ranks go on waiting. CHAINERMN_TIMEOUT=2 would end the job" in text
        assert explained(text) == ["link-silent"]
    event = events.sent(b"".join(told).decode())[0]
    assert (event["event"], event["host"], event["ends_job"]) == ("host_lost", "far", ends_job)
    assert event["reason"] == "far has not answered for 20.0 s"


def test_the_rank_that_died_first_is_named_and_the_others_are_not(monkeypatch, mine, start_rank):
    """Such as those that the launcher killed then, and may name."""
    (first, one), (second, other) = start_rank(2, "after a call"), start_rank(1)
    watched, said, _, told = watching(monkeypatch, [description(0), other, one])
    for process in (first, second):
        process.kill()
        process.wait()
        watched.ends.wait(0)
        watched.tell_of_first()
    (words,) = said
    assert words.startswith(f"ChainerMN: rank 2 (process {first.pid} on ")
    gone = " is gone, last seen in no call, after allreduce (collective call 4, 80 bytes), inside"
    assert f"{gone} evaluate for " in words
    assert explained(words) == ["rank-gone"]
    (event,) = events.sent(b"".join(told).decode())
    assert event["event"] == "rank_lost"
    assert (event["rank"], event["lost"], event["pid"]) == (0, 2, first.pid)
    assert f" is {event['how']}." in words


def test_launchers_that_read_nothing_keep_the_end_waiting_once_and_not_for_each_rank(
    monkeypatch, mine
):
    def in_vain(_, text, seconds, frames=()):
        time.sleep(max(0.0, seconds))
        given.append(max(0.0, seconds))
        return False

    given: list[float] = []
    watched, *_ = watching(monkeypatch, [description(0)] * 50)
    monkeypatch.setattr(monitor, "SAYING_SECONDS", 5.0)
    monkeypatch.setattr(monitor.processes, "write_stderr", in_vain)
    monkeypatch.setattr(monitor.processes, "write", in_vain)
    monitor.Monitor.say(watched, "words")
    assert len(given) == 50 + len(watched.launchers) + 1
    assert given[0] > 0
    assert sum(given) <= 5.0
