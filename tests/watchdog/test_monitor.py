"""The monitor, asked in this process: what it says of ranks that are alone or can't be reached."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chainermn_comm.watchdog import monitor
from tests.support import events, jobs
from tests.support.explained import explained
from tests.support.monitors import machine, place
from tests.support.processes import is_gone
from tests.support.watchdog import clock, description, record

COMMUNICATOR = (0, 1)
# A rank that does something alone, after a call or before the first.
OTHER_RANK = """
import json, sys
from chainermn_comm.watchdog import alone
from tests.support.watchdog import description, record
described = description(int(sys.argv[1]))
recorder = record((0, 1), int(sys.argv[1]), 3)
if sys.argv[2] == "after a call":
    recorder.collective("allreduce", 4, nbytes=80)
    recorder.leave()
with alone("evaluate"):
    print(json.dumps(described), flush=True)
    sys.stdin.read()
"""


# One that waits in MPI_Finalize and has a child.
LAST_RANK = """
import json, os, subprocess, sys
from tests.support.watchdog import FINALIZE, WORLD, description, record
os.setpgid(0, 0)
described = description(1)
record(WORLD, 0, 1).collective(FINALIZE, 0)
child = subprocess.Popen(["sleep", "1000"])
print(json.dumps([described, child.pid]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mine():
    """What this process records of its calls, as rank 0."""
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


def make_monitor(ranks, others=(), ends_job=True):
    config = {"timeout": {"seconds": 2.0, "ends_job": ends_job, "silence": 20.0}}
    tree = place(0, [machine("near", [0]), *others]) if others else None
    config |= {"launch": events.LAUNCH, "listeners": [], "tree": tree}
    return monitor.Monitor(config, [monitor.MonitoredRank(each) for each in ranks])


def watching(monkeypatch, ranks, others=(), ends_job=True):
    """A monitor of these ranks, what it says, an item for each time that it ends them, events."""
    made = make_monitor(ranks, others, ends_job)
    said, ended, told = [], [], []

    def say(text, event=()):
        said.append(text)
        told.extend(event)

    monkeypatch.setattr(made, "print", say)
    monkeypatch.setattr(made, "end_ranks", lambda: ended.append(True))
    return made, said, ended, told


def test_each_nodes_own_report_is_printed_when_others_cannot_be_reached(monkeypatch, mine):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far = machine("far", [1], [silent])
        watched, said, ended, told = watching(monkeypatch, [description(0)], [far])
        mine.collective("allreduce", 7, nbytes=400)
        assert watched.check_calls(clock() + 2.5)
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
        assert not watched.check_calls(begun + seconds), said
    reports = [text for text in said if "likely culprit" in text]
    assert len(reports) == 1, said
    assert "culprit: rank 1 " in reports[0]
    assert "is in no call" in reports[0]
    assert ", inside evaluate for " in reports[0]
    assert "The ranks go on waiting for it, 600 s at most." in reports[0]
    assert ended == []
    assert any(watched.check_calls(begun + seconds) for seconds in range(601, 620))
    assert "ending the job" in said[-1]
    assert ended == [True]


@pytest.mark.parametrize("ends_job", [False, True])
def test_a_machine_that_is_silent_ends_the_job_only_where_a_time_out_was_set(monkeypatch, ends_job):
    far = machine("far", [1])
    watched, said, ended, told = watching(monkeypatch, [description(0)], [far], ends_job)
    watched.tree.neighbours[1].last_heartbeat = clock()
    assert not watched.check_neighbours(clock() + 19)
    assert (said, ended) == ([], [])
    for turn in range(2):
        assert watched.check_neighbours(clock() + 21 + turn) == ends_job
    assert len(ended) == 2 * ends_job
    (text,) = said  # once, until it is heard again
    if not ends_job:
        assert "nothing was heard of far for 20.0 s" in text
        assert "The ranks go on waiting. CHAINERMN_TIMEOUT=2 would end the job" in text
        assert explained(text) == ["link-silent"]
    event = events.sent(b"".join(told).decode())[0]
    assert (event["event"], event["host"], event["ends_job"]) == ("host_lost", "far", ends_job)
    assert event["reason"] == "far has not answered for 20.0 s"


def test_of_two_silent_machines_the_one_is_reported_that_no_other_monitor_reports(monkeypatch):
    lost = [machine("a", [1]), machine("b", [2])]
    watched, said, *_ = watching(monkeypatch, [description(0)], lost)
    for peer in watched.tree.neighbours.values():
        peer.last_heartbeat = clock()
    monkeypatch.setattr(watched.tree, "is_first_to_find_silent", lambda number: number == 2)
    assert watched.check_neighbours(clock() + 21)
    (text,) = said
    assert "b has not answered for 20.0 s" in text


def test_the_rank_that_died_first_is_named_and_the_others_are_not(monkeypatch, mine, start_rank):
    """Such as those that the launcher killed then, and may name."""
    (first, one), (second, other) = start_rank(2, "after a call"), start_rank(1)
    watched, said, _, told = watching(monkeypatch, [description(0), other, one])
    for process in (first, second):
        process.kill()
        process.wait()
        watched.exits.wait(0)
        watched.report_first_failure()
    (words,) = said
    assert words.startswith(f"ChainerMN: rank 2 (process {first.pid} on ")
    gone = " is gone, last seen in no call, after allreduce (collective call 4, 80 bytes), inside"
    assert f"{gone} evaluate for " in words
    assert explained(words) == ["rank-gone"]
    (event,) = events.sent(b"".join(told).decode())
    assert event["event"] == "rank_lost"
    assert (event["rank"], event["lost"], event["pid"]) == (0, 2, first.pid)
    assert f" is {event['how']}." in words


def test_a_monitor_that_fails_is_started_again_and_at_last_the_ranks_are_told(monkeypatch, capfd):
    class Failing:
        def __init__(self, *_):
            raise KeyError("planted")

    ranks = [monitor.MonitoredRank(description(0))]
    monkeypatch.setattr(monitor, "Monitor", Failing)
    monitor.supervise({}, ranks)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == monitor.ATTEMPTS + 1
    assert all("failed: KeyError: 'planted'" in line for line in told[:-1])
    assert told[-1].startswith("ChainerMN: the process that watches the ranks on ")
    assert told[-1].endswith("calls that wait too long won't be reported any more.")


def test_a_job_that_is_ended_while_its_ranks_finalize_has_failed():
    """So nothing of them is left: no child, nor a folder of the launcher's."""
    command = [sys.executable, "-c", LAST_RANK]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=jobs.variables(), **pipes) as rank:
        described, child = json.loads(rank.stdout.readline())  # type: ignore[union-attr]
        made = make_monitor([described])
        assert made.ranks[0].read(clock()).has_finished
        made.end_ranks()
        assert rank.wait(timeout=jobs.SECONDS) != 0
        made.clean()
        assert is_gone(child)
