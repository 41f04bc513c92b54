"""The monitor, asked in this process: what it says of ranks that wait or can't be reached."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from chainermn_comm.watchdog.monitor import monitor
from tests.support.jobs import runner
from tests.support.jobs.processes import is_gone
from tests.support.tools.explained import verdict_on
from tests.support.watchdog import events
from tests.support.watchdog.monitors import close, cut, star_of
from tests.support.watchdog.records import (
    COLLECTIVE,
    MonitoredRank,
    clock,
    description,
    record,
)

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


# What is told to the only monitor of a job.
ALONE = {"number": 0, "names": ["rank 0 on near"], "endpoints": [], "secret": ""}
opened: list = []  # the spokes of monitors that were made


def make_monitor(ranks, star=None, ends_job=True):
    config = {"timeout": {"seconds": 2.0, "ends_job": ends_job, "silence": 20.0}}
    config |= {"launch": events.LAUNCH, "listener": None, "star": star or ALONE}
    made = monitor.Monitor(config, [MonitoredRank(each) for each in ranks])
    opened.extend([made.star] if star and star["number"] else [])
    return made


@pytest.fixture
def star():
    """What a hub is told that has heard nothing of the one other machine; the other's place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        names = ["rank 0 on near", "rank 1 on far"]
        yield star_of(0, listener, names), star_of(1, listener, names)
    while opened:
        close(opened.pop())


def watching(monkeypatch, ranks, star=None, ends_job=True):
    """A monitor of these ranks, what it says, an item for each time that it ends them, events."""
    made = make_monitor(ranks, star, ends_job)
    said, ended, told = [], [], []

    def say(text, event=()):
        said.append(text)
        told.extend(event)

    monkeypatch.setattr(made, "print", say)
    monkeypatch.setattr(made, "end_ranks", lambda: ended.append(True))
    return made, said, ended, told


@pytest.mark.parametrize("number", [0, 1])
def test_without_the_others_the_hub_and_a_spoke_report_what_they_see(
    monkeypatch, mine, star, number
):
    monkeypatch.setattr(monitor, "HUB_SECONDS", 0.0)
    watched, said, _, told = watching(monkeypatch, [description(0)], star[number])
    mine.collective("allreduce", 7, nbytes=400)
    assert watched.check_calls(clock() + 2.5)
    (report,) = said
    assert "rank 0 (process" in report
    assert "waits in allreduce (collective call 7, 400 bytes)" in report
    assert "not heard of: 1 of the 2 ranks that take part" in report
    other = ("rank 1 on far", "rank 0 on near")[number]
    assert (
        f"ranks wait for others that could not be asked; {other} didn't answer"
        in report
    )
    # Of which, where other tests have left threads, the longest are cut.
    assert "Stacks of rank 0, innermost call first:\n" in report
    assert "ending the job" in report
    reason = events.the_only("watchdog_abort", b"".join(told).decode())["reason"]
    assert reason.startswith("ranks wait for others that could not be asked")


def test_a_spoke_leaves_it_to_the_hub_until_that_is_late(monkeypatch, mine, star):
    watched, said, *_ = watching(monkeypatch, [description(0)], star[1])
    sent = []
    monkeypatch.setattr(
        watched.star, "tell", lambda kind, **fields: sent.append((kind, fields))
    )
    mine.collective("allreduce", 7)
    begun = clock()
    for seconds in (0.5, 1.1, 1.2, 3.0):
        assert not watched.check_calls(begun + seconds)
    assert [kind for kind, _ in sent] == ["waits", "waits"]  # once a second
    assert not watched.check_calls(begun + 2.0 + monitor.HUB_SECONDS - 0.1)
    assert said == []
    watched.check_calls(begun + 2.0 + monitor.HUB_SECONDS + 0.1)
    assert "rank 0 on near didn't answer" in said[0]
    watched.hear(0, {"kind": "known"})  # of another that has reported it
    assert not watched.check_calls(begun + 40.0)


@pytest.mark.parametrize("ends_job", [False, True])
def test_a_machine_that_is_lost_ends_the_job_if_a_call_waits_and_a_time_out_was_set(
    monkeypatch, mine, star, ends_job
):
    watched, said, _, told = watching(monkeypatch, [description(0)], star[1], ends_job)
    cut(watched.star)
    assert not watched.check_links(clock() + 100)
    mine.collective("allreduce", 1)
    assert not watched.check_links(clock() + 19)
    assert said == []
    for turn in range(2):
        assert watched.check_links(clock() + 21 + turn) == (ends_job and turn == 0)
    (text,) = said  # once, until it is reached again
    assert (
        "nothing was heard of rank 0 on near for 20.0 s, and rank 0 (process " in text
    )
    verdict = verdict_on(text)
    assert verdict.how.startswith("nothing was heard of rank 0 on near for 20.0 s")
    assert "ping that host" in verdict.next_step
    assert text.endswith(f"{verdict.next_step}\n")
    if not ends_job:
        assert "The ranks go on waiting. CHAINERMN_TIMEOUT=2 would end the job" in text
    event = events.sent(b"".join(told).decode())[0]
    assert (event["event"], event["host"], event["ends_job"]) == (
        "host_lost",
        "near",
        ends_job,
    )
    assert event["reason"].startswith("nothing was heard of rank 0 on near for 20.0 s")


def test_a_lost_machine_ends_no_job_whose_calls_go_on(monkeypatch, mine, star):
    watched, said, *_ = watching(monkeypatch, [description(0)], star[1])
    cut(watched.star)
    mine.collective("allreduce", 7)
    now = clock()
    assert not watched.check_links(now)
    mine.leave()
    assert not watched.check_links(clock())  # one has ended since
    mine.collective("allreduce", 8)
    assert not watched.check_links(now + 100)
    again(watched)
    assert not watched.check_links(clock())
    mine.message("send", 1, 5)
    mine.leave()
    assert not watched.check_links(clock())  # a message has come through since
    mine.message("recv", 1, 5)
    assert not watched.check_links(clock() + 100)
    assert said == []


@pytest.mark.parametrize("number", [0, 1])
def test_a_time_out_less_than_the_silence_keeps_no_loss_from_being_seen(
    monkeypatch, mine, star, number
):
    """Calls that wait for it have been judged again and again by then."""
    watched, said, *_ = watching(
        monkeypatch, [description(0)], star[number], ends_job=False
    )
    monkeypatch.setattr(monitor, "collect_stacks", lambda ranks: {})
    monkeypatch.setattr(watched.star, "lost", lambda: ["the other one"])
    mine.collective("allreduce", 7)
    begun = clock()
    seen = []
    for seconds in range(1, 60):
        assert not watched.check_links(begun + seconds)
        assert not watched.check_calls(begun + seconds)
        seen.extend([seconds] * (len(said) - len(seen)))
    assert seen[-1] in (20, 21)
    assert "The ranks go on waiting." in said[-2]
    assert "nothing was heard of the other one for 20.0 s" in said[-1]


def again(watched):
    """It is noticed anew that the machine is lost."""
    watched.lost_at, watched.knows_loss = math.inf, False


def test_a_lost_machine_ends_no_job_while_a_rank_that_can_be_reached_is_waited_for(
    monkeypatch, mine, start_rank, star
):
    with_both = [description(0), start_rank(1, "after a call")[1]]
    watched, said, *_ = watching(monkeypatch, with_both, star[0])
    monkeypatch.setattr(watched.star, "lost", lambda: ["rank 2 on far"])
    other = watched.ranks[1]
    read = other.read
    mine.collective("allreduce", 5)
    begun = clock()
    assert not any(watched.check_links(begun + seconds) for seconds in range(60))
    assert said == []
    # It has come, but a moment ago.
    waits = replace(read(begun).calls[0], state=COLLECTIVE, sequence=5, age=3.0)
    monkeypatch.setattr(other, "read", lambda now: replace(read(now), calls=(waits,)))
    assert not watched.check_links(begun + 60)
    waits = replace(waits, age=21.0)
    assert watched.check_links(begun + 60)


def test_with_no_time_out_nothing_is_reported_but_a_rank_that_dies(
    monkeypatch, mine, star
):
    watched, said, *_ = watching(monkeypatch, [description(0)], star[1])
    watched.timeout = monitor.Timeout(0.0)
    cut(watched.star)
    mine.collective("allreduce", 7)
    assert not watched.check_links(clock() + 1e6)
    assert not watched.check_calls(clock() + 1e6)
    assert said == []


def test_of_several_machines_the_first_failure_is_reported_by_the_hub(
    monkeypatch, star
):
    watched, said, *_ = watching(monkeypatch, [description(0)], star[0])
    watched.config["launch"] = None  # which would say it instead
    heard = []
    watched.star.links[1] = SimpleNamespace(send=lambda kind, **_: heard.append(kind))
    then = {"age": 9.0, "rank": None}  # it called MPI_Abort
    lost = asdict(watched.read(clock())[0])
    watched.hear(1, {"kind": "failed", "age": 1.0, "rank": lost})
    assert not watched.report_failure()  # another one may say so, too
    now = clock()
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now + 2.0)
    assert watched.report_failure()
    assert watched.report_failure()
    (words,) = said
    assert words.startswith("\nChainerMN: rank 0 (process ")
    assert set(heard) == {"reported"}
    watched.failure_due = None
    watched.hear(1, {"kind": "failed", **then})
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now + 4.0)
    assert watched.report_failure()
    assert len(said) == 1


@pytest.mark.parametrize(("age", "ends"), [(1.0, False), (9.0, True)])
def test_where_a_rank_elsewhere_called_mpi_abort_in_vain_the_job_ends(
    monkeypatch, star, age, ends
):
    """As where its launcher has lost the message."""
    watched, *_ = watching(monkeypatch, [description(0)], star[0])
    ended = []
    monkeypatch.setattr(watched, "end_ranks", lambda: ended.append(True))
    watched.hear(1, {"kind": "failed", "age": age, "rank": None})
    assert watched.look() != ends
    assert ended == [True] * ends


@pytest.mark.parametrize("launch", [None, events.LAUNCH])
def test_the_rank_that_died_first_is_named_and_the_others_are_not(
    monkeypatch, mine, start_rank, launch
):
    """Such as those that the launcher killed then, and may name."""
    (first, one), (second, other) = start_rank(2, "after a call"), start_rank(1)
    watched, said, _, told = watching(monkeypatch, [description(0), other, one])
    watched.config["launch"] = launch
    for process in (first, second):
        process.kill()
        process.wait()
        watched.poll(0.1)
        watched.note_failure()
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
    watched, text = (
        make_monitor([description(0)]),
        "a report, \u2028 and \udc80 so on\n" * 100,
    )
    watched.print(text)
    watched.print(
        text + "Next step: which the launcher adds to what ends the job", [b""]
    )
    for plain, lines, _ in printed:
        assert plain == ""
        assert events.shown(b"".join(lines).decode()) == text
    watched.config["launch"] = None
    watched.print(text)
    assert printed[2][:2] == (text, [])
