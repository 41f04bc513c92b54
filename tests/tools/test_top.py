"""`chainermn top` and `stacks` on jobs that run, and on ranks that hang."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess

import pytest

from tests.chaos.faults import KINDS, MOMENTS, Case
from tests.support.jobs import commands
from tests.support.watchdog import looking
from tests.support.watchdog.looking import looked_into, while_running

pytestmark = pytest.mark.ci

# Where the GIL is held no Python runs; of a stopped process there are no stacks.
STALLS = [name for name, kind in KINDS.items() if kind.group == "stall"]
CASES = [
    # Where it writes, rank 0 alone has as many arrays as the fault waits for.
    Case(kind, name, moment.iterations[0], 0 if name == "writing" else 5, 8)
    for kind in STALLS
    for name, moment in MOMENTS.items()
]
DEFAULT = Case("held", "collective", 4, 2, 3)


@pytest.mark.parametrize(
    "case",
    [DEFAULT, *(pytest.param(case, marks=pytest.mark.full) for case in CASES)],
    ids=lambda case: f"{case.kind}-{case.moment}-{case.ranks}",
)
def test_a_rank_that_hangs_is_shown_while_it_does(case):
    found, stacks = looked_into(case)
    rank = found["ranks"][case.victim]
    assert found["slowest"] == case.victim, found
    assert rank["rank"] == case.victim
    assert rank["waited_for"] == 1.0
    assert rank["doing"] == ("stopped" if case.kind == "SIGSTOP" else "computing")
    others = [it for it in found["ranks"] if it is not rank]
    operations = MOMENTS[case.moment].operations
    assert len(others) == case.ranks - 1
    for other in others:
        assert (other["doing"], other["waits_for"]) == ("waiting", [case.victim]), found
        assert other["operation"] in operations, found
        assert other["memory_bytes"] > 1 << 20
    expected = KINDS[case.kind].said if case.kind != "SIGSTOP" else "no stacks came"
    block = next(
        it for it in stacks.split("\n\nrank ") if f"process {rank['pid']}:" in it
    )
    assert expected in f"{block}\n", stacks


def test_a_job_that_trains_is_shown_by_any_of_its_numbers():
    def look(launcher):
        first = json.loads(commands.chainermn("top", launcher, "--json").stdout)
        rank = first["ranks"][2]["pid"]
        shown = commands.chainermn("top", rank, "--sort", "waited_for")
        stacks = commands.chainermn("stacks", rank)
        return launcher, first, shown, stacks

    launcher, first, shown, stacks = while_running(look)
    assert first["job"] == launcher
    assert first["slowest"] == 1
    assert [it["rank"] for it in first["ranks"]] == [0, 1, 2]
    assert all(1 < it["steps_per_second"] < 20.5 for it in first["ranks"]), first
    # Each step has four; the two counts are read at once.
    assert all(
        it["examples_per_second"] == 4 * it["steps_per_second"] for it in first["ranks"]
    )
    assert first["unseen"] == []
    assert first["ranks"][0]["waiting"] > first["ranks"][1]["waiting"]
    assert shown.returncode == 0, shown
    title, head, *rows, last = shown.stdout.strip().splitlines()
    assert title.startswith(f"Job {launcher}: ")
    assert "script.py" in title
    assert head.split()[:4] == ["rank", "host", "steps/s", "examples/s"]
    assert rows[0].split()[:2] == ["1", os.uname().nodename], shown
    steps, examples = map(float, rows[0].split()[2:4])
    assert examples == pytest.approx(4 * steps, rel=0.01)  # they are rounded
    assert last.startswith(f"slowest: rank 1 on {os.uname().nodename}, process ")
    assert stacks.returncode == 0
    for rank in range(3):
        assert f"rank {rank} on {os.uname().nodename}, process " in stacks.stdout
    assert "Current thread (most recent call first):" in stacks.stdout


@pytest.mark.full
def test_on_a_terminal_it_is_refreshed_until_interrupted():
    def look(launcher):
        ours, theirs = pty.openpty()
        command = commands.start("top", launcher, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        shown = b""
        while shown.count(b"slowest: ") < 2:
            shown += os.read(ours, 1 << 16)
        command.send_signal(signal.SIGINT)
        said = command.communicate(timeout=commands.SECONDS)[1]
        os.close(ours)
        return command.returncode, said, shown.decode()

    status, said, shown = while_running(look)
    assert (status, said) == (0, "")
    assert "\x1b[2J" in shown  # the screen is cleared


@pytest.mark.full
def test_the_end_of_the_job_ends_it():
    def look(launcher):
        ours, theirs = pty.openpty()
        how = {"stdout": theirs, "stderr": subprocess.PIPE}
        return launcher, commands.start("top", launcher, **how), ours, theirs

    launcher, command, *files = while_running(look, last=100)
    assert (
        command.communicate(timeout=commands.SECONDS)[1]
        == f"Error: job {launcher} has ended\n"
    )
    assert command.returncode == 1
    for file in files:
        os.close(file)


@pytest.mark.full
def test_a_monitor_that_is_stopped_is_named(monkeypatch):
    def look(launcher):
        monitors = looking.monitors_of(launcher)
        for each in monitors:
            each.suspend()
        done = commands.chainermn("top", launcher)
        for each in monitors:
            each.resume()
        return done

    done = while_running(look)
    assert done.returncode == 1
    assert "doesn't answer; is it stopped?" in done.stderr


@pytest.mark.parametrize("command", ["top", "stacks"])
def test_without_such_a_job_it_says_where_to_look(command):
    done = commands.invoke(command, 1)
    assert done.exit_code == 2
    assert (
        "no such job of yours here; its ranks may not have a communicator yet"
        in done.stderr
    )


@pytest.mark.full
def test_several_jobs_are_listed():
    def outer(first):
        return first, while_running(
            lambda second: (second, commands.chainermn("stacks"))
        )

    first, (second, done) = while_running(outer)
    assert done.returncode == 2
    assert "such jobs of yours here; give the number of one" in done.stderr
    for number in (first, second):
        assert f"  {number}  " in done.stderr
