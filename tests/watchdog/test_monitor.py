"""The monitor, asked in this process: what it says of ranks that wait or fail."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from chainermn_comm.watchdog.monitor import monitor
from tests.support.jobs import runner
from tests.support.jobs.processes import is_gone
from tests.support.tools.jobs import verdict_on
from tests.support.watchdog import events
from tests.support.watchdog.monitors import (
    address_of,
    close_monitor,
    limited,
    made_monitor,
    seen_as_user,
)
from tests.support.watchdog.records import clock, description, job_of, monitored, record

COMMUNICATOR = 1
# Another rank, which has a child and has ended, or is in no call: after one or before
# the first.
OTHER_RANK = """
import json, os, subprocess, sys
from tests.support.watchdog.records import FINALIZE, WORLD, description, record
world, when = int(sys.argv[1]), sys.argv[2]
described, child = description(world), None
if when == "after a call":
    recorder = record(1, world, 3)
    recorder.collective("allreduce", 4, nbytes=80)
    recorder.leave()
if when == "at its end":
    os.setpgid(0, 0)
    record(WORLD, 0, 1).collective(FINALIZE, 0)
    child = subprocess.Popen(["sleep", "1000"]).pid
print(json.dumps([described, child]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mine():
    """What this process records of its calls, as rank 0."""
    made = record(COMMUNICATOR, 0, 2)
    yield made
    made.release()


@pytest.fixture
def start_rank():
    """Starts another rank: its process, what the monitor must know of it, and its child."""
    started = []

    def start_rank(world, when="before any"):
        process = subprocess.Popen(
            [sys.executable, "-c", OTHER_RANK, str(world), when],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=runner.variables(),
        )
        started.append(process)
        return process, *json.loads(process.stdout.readline())  # type: ignore[union-attr]

    yield start_rank
    for process in started:
        process.communicate()


@pytest.fixture
def watch(monkeypatch):
    """Makes a monitor of these ranks, and lists of what it says and of its events."""
    opened = []

    def watch(described, seconds=2.0, ends_job=True):
        made = made_monitor()
        opened.append(made)
        made.local.ranks += [monitored(each) for each in described]
        made.local.launch = events.LAUNCH
        limited(made, seconds, ends_job)
        said = []
        told = []

        def say(text, event=b"", held=()):
            said.append(text)
            told.append(event)

        monkeypatch.setattr(made, "print", say)
        return made, said, told

    yield watch
    for made in opened:
        close_monitor(made)


def judge(made, after=0.0):
    """Judge as if so many seconds had passed; whether the job is to end."""
    now = clock() + after
    ranks = made.local.read(now)
    made.judge.report_failure(ranks, now)
    made.judge.report_calls(ranks, now)
    return made.must_end


def test_a_call_that_waits_for_ranks_nobody_has_heard_of_is_reported(watch, mine):
    watched, said, told = watch([description(0)])
    mine.collective("allreduce", 7, nbytes=400)
    assert not judge(watched, 1.5)
    assert judge(watched, 2.5)
    warning, report = said
    assert "rank 0 has waited 1.5 s in allreduce" in warning
    assert "waits in allreduce (collective call 7, 400 bytes)" in report
    # Of which, where other tests have left threads, the longest are cut.
    assert "Stacks of rank 0, innermost call first:\n" in report
    assert report.endswith("ending the job.\n")  # the launcher says what to do
    event = events.the_only("watchdog_abort", b"".join(told).decode())
    assert event["reason"] == "ranks wait for others that could not be asked"
    assert event["how"] == event["reason"]


def test_a_report_that_names_many_machines_fits_in_an_event(watch, mine):
    watched, said, told = watch([description(0)])
    mine.collective("allreduce", 7)
    ranks = watched.local.read(clock())
    hosts = [
        f"ranks 0, 1, 2, 3, 4, 5, 6, 7 on a-large-clusters-host{n}" for n in range(32)
    ]
    watched.report(job_of(ranks, hosts), [(ranks[0], ranks[0].waits[0])])
    assert watched.must_end
    assert hosts[-1] in said[0]
    event = events.the_only("watchdog_abort", told[0].decode())
    assert event["how"].startswith("ranks wait for others")


def test_nobody_has_waited_while_the_machine_stood_still(watch, mine, monkeypatch):
    watched, said, _ = watch([description(0)])
    mine.collective("allreduce", 7)
    monkeypatch.setattr(watched, "handle_messages", lambda seconds: None)
    times = iter([clock(), *[clock() + 50.0] * 100])
    monkeypatch.setattr(monitor.time, "monotonic", lambda: next(times))
    assert watched.look()
    assert said == []


def test_without_a_time_out_nothing_is_reported(watch, mine):
    watched, said, _ = watch([description(0)], 0.0, False)
    mine.collective("allreduce", 7)
    assert not judge(watched, 1e6)
    assert said == []


@pytest.mark.parametrize("launch", [None, events.LAUNCH])
def test_the_rank_that_died_first_is_named_and_the_others_are_not(
    watch, mine, start_rank, launch
):
    """Such as those that the launcher killed then, and may name."""
    first, one, _ = start_rank(2, "after a call")
    second, other, _ = start_rank(1)
    watched, said, told = watch([description(0), other, one], 0.0, False)
    watched.local.launch = launch
    for process, rank in ((first, 2), (second, 1)):
        process.kill()
        process.wait()
        watched.local.ranks[rank].note_end()
        judge(watched)
    (words,) = said
    how = "is gone, last seen in no call, after allreduce (collective call 4, 80 bytes)"
    if launch is None:
        assert words.startswith(f"\nChainerMN: rank 2 (process {first.pid} on ")
        assert f" {how}.\nNext step: read its last lines" in words
        assert verdict_on(words).rank == 2
        assert told == [b""]
        return
    assert words == ""  # the launcher says it, and knows more
    (event,) = events.sent(b"".join(told).decode())
    assert event["event"] == "rank_lost"
    assert event["how"] == how
    assert event["rank"] == 0
    assert event["lost"] == 2
    assert event["pid"] == first.pid


def test_a_job_that_is_ended_while_its_ranks_finalize_has_failed(watch, start_rank):
    """So no child of them is left."""
    rank, described, child = start_rank(1, "at its end")
    made, _, _ = watch([described])
    assert made.local.ranks[0].read(clock()).has_finished
    made.end_ranks()
    assert rank.wait(timeout=runner.SECONDS) != 0
    made.clean()
    assert is_gone(child)


@pytest.mark.parametrize("how", ["ours", "silent", "another user's"])
def test_a_monitor_answers_its_own_user_alone_and_waits_for_nobody(watch, mine, how):
    watched, _, _ = watch([description(0)])
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
            with suppress(ConnectionResetError):
                assert asker.recv(1) == b""
