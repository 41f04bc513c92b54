"""The monitor, asked in this process: what it says of ranks that wait or fail."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chainermn_comm.watchdog.monitor import monitor
from tests.support.jobs import runner
from tests.support.jobs.processes import is_gone
from tests.support.tools.explained import verdict_on
from tests.support.watchdog import events
from tests.support.watchdog.monitors import (
    address_of,
    close_monitor,
    limited,
    made_monitor,
    seen_as_user,
)
from tests.support.watchdog.records import clock, description, monitored, record

COMMUNICATOR = (0, 1)
# A rank in no call, after one or before the first.
OTHER_RANK = """
import json, sys
from tests.support.watchdog.records import description, record
described = description(int(sys.argv[1]))
recorder = record((0, 1), int(sys.argv[1]), 3)
if sys.argv[2] == "after a call":
    recorder.collective("allreduce", 4, nbytes=80)
    recorder.leave()
print(json.dumps(described), flush=True)
sys.stdin.read()
"""


# One that waits in MPI_Finalize and has a child.
LAST_RANK = """
import json, os, subprocess, sys
from tests.support.watchdog.records import FINALIZE, WORLD, description, record
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
            env=runner.variables(),
        )
        started.append(process)
        return process, json.loads(process.stdout.readline())  # type: ignore[union-attr]

    yield start_rank
    for process in started:
        process.communicate()


opened: list = []


@pytest.fixture(autouse=True)
def closed():
    yield
    while opened:
        close_monitor(opened.pop())


def make_monitor(described, timeout=(2.0, True)):
    made = made_monitor()
    opened.append(made)
    made.ranks += [monitored(each) for each in described]
    for rank in made.ranks:
        made.files.add(rank.process)
    made.launch = events.LAUNCH
    limited(made, *timeout)
    made.have_met = True
    return made


def watching(monkeypatch, described, **options):
    """A monitor of these ranks, what it says, and the events that it sends."""
    made = make_monitor(described, **options)
    said, told = [], []

    def say(text, events=(), held=()):
        said.append(text)
        told.extend(events)

    monkeypatch.setattr(made, "print", say)
    return made, said, told


def test_a_call_that_waits_for_ranks_nobody_has_heard_of_is_reported(monkeypatch, mine):
    watched, said, told = watching(monkeypatch, [description(0)])
    mine.collective("allreduce", 7, nbytes=400)
    assert not watched.judge_calls(clock() + 1.5)
    assert watched.judge_calls(clock() + 2.5)
    warning, report = said
    assert "rank 0 has waited 1.5 s in allreduce" in warning
    assert "waits in allreduce (collective call 7, 400 bytes)" in report
    assert "not heard of: 1 of the 2 ranks that take part" in report
    assert "ranks wait for others that could not be asked" in report
    # Of which, where other tests have left threads, the longest are cut.
    assert "Stacks of rank 0, innermost call first:\n" in report
    assert "ending the job" in report
    reason = events.the_only("watchdog_abort", b"".join(told).decode())["reason"]
    assert reason.startswith("ranks wait for others that could not be asked")


def test_before_ranks_have_met_those_that_have_not_come_are_named(monkeypatch, mine):
    watched, said, _ = watching(monkeypatch, [description(0)])
    watched.have_met = False
    watched.members = {0, 1, 2}
    mine.collective("create_communicator", 0)
    assert watched.judge_calls(clock() + 2.5)
    words = "likely culprit: ranks 1, 2 have not come to create_communicator on "
    assert words in said[0]


def test_a_report_comes_once_where_the_job_goes_on(monkeypatch, mine):
    watched, said, _ = watching(monkeypatch, [description(0)], timeout=(2.0, False))
    mine.collective("allreduce", 7)
    begun = clock()
    for seconds in (2.5, 3.0, 30.0):
        assert not watched.judge_calls(begun + seconds)
    assert len(said) == 1
    assert "The ranks go on waiting. CHAINERMN_TIMEOUT=2 would end the job" in said[0]


def test_nobody_has_waited_while_the_machine_stood_still(monkeypatch, mine):
    watched, said, _ = watching(monkeypatch, [description(0)])
    mine.collective("allreduce", 7)
    monkeypatch.setattr(watched, "handle_messages", lambda seconds: None)
    times = iter([clock(), *[clock() + 50.0] * 100])
    monkeypatch.setattr(monitor.time, "monotonic", lambda: next(times))
    assert watched.look()
    assert said == []


def test_without_a_time_out_nothing_is_reported(monkeypatch, mine):
    watched, said, _ = watching(monkeypatch, [description(0)], timeout=(0.0, False))
    mine.collective("allreduce", 7)
    assert not watched.judge_calls(clock() + 1e6)
    assert said == []


@pytest.mark.parametrize("launch", [None, events.LAUNCH])
def test_the_rank_that_died_first_is_named_and_the_others_are_not(
    monkeypatch, mine, start_rank, launch
):
    """Such as those that the launcher killed then, and may name."""
    (first, one), (second, other) = start_rank(2, "after a call"), start_rank(1)
    watched, said, told = watching(monkeypatch, [description(0), other, one])
    watched.launch = launch
    for process, rank in ((first, 2), (second, 1)):
        process.kill()
        process.wait()
        watched.ranks[rank].note_end()
        watched.report_failure()
    (words,) = said
    last_seen = (
        "is gone, last seen in no call, after allreduce (collective call 4, 80 bytes)"
    )
    if launch is None:
        assert words.startswith(f"\nChainerMN: rank 2 (process {first.pid} on ")
        assert f" {last_seen}.\nNext step: read its last lines" in words
        assert verdict_on(words).rank == 2
        assert told == []
        return
    assert words == ""  # the launcher says it, and knows more
    (event,) = events.sent(b"".join(told).decode())
    assert (event["event"], event["how"]) == ("rank_lost", last_seen)
    assert (event["rank"], event["lost"], event["pid"]) == (0, 2, first.pid)


def test_a_job_that_is_ended_while_its_ranks_finalize_has_failed():
    """So no child of them is left."""
    command = [sys.executable, "-c", LAST_RANK]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=runner.variables(), **pipes) as rank:
        described, child = json.loads(rank.stdout.readline())  # type: ignore[union-attr]
        made = make_monitor([described])
        assert made.ranks[0].read(clock()).has_finished
        made.end_ranks()
        assert rank.wait(timeout=runner.SECONDS) != 0
        made.clean()
        assert is_gone(child)


def test_the_launcher_gets_a_text_as_events_lest_it_look_like_a_ranks(
    monkeypatch, mine
):
    printed = []
    monkeypatch.setattr(monitor, "print_for", lambda _, *how: printed.append(how))
    watched = make_monitor([description(0)])
    text = "a report, \u2028 and \udc80 so on\n" * 100
    watched.print(text)
    watched.print(
        text + "Next step: which the launcher adds to what ends the job", [b""]
    )
    for plain, lines, _ in printed:
        assert plain == ""
        assert events.shown(b"".join(lines).decode()) == text
    watched.launch = None
    watched.print(text)
    assert printed[2][0] == text


@pytest.mark.parametrize("how", ["ours", "silent", "another user's"])
def test_a_monitor_answers_its_own_user_alone_and_waits_for_nobody(mine, how):
    watched = make_monitor([description(0)])
    user = os.geteuid() + (how == "another user's")
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asker,
        seen_as_user(user),
    ):
        asker.connect(address_of(watched))
        if how != "silent":
            asker.sendall(b'{"kind": "ask", "what": "stacks"}')
        begun = clock()
        watched.handle_messages(1.0)
        watched.handle_messages(0.1)
        asker.settimeout(0.1)
        if how == "ours":
            (rank,) = json.loads(asker.recv(1 << 20))["ranks"]
            assert rank["stacks"]
        elif how == "silent":
            assert clock() - begun < 1.0
        else:
            with contextlib.suppress(ConnectionResetError):
                assert asker.recv(1) == b""
