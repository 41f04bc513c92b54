"""`chainermn top` and `stacks` on jobs that run, and on ranks that hang."""

from __future__ import annotations

import json
import os
import pty
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
    expected = ("computing", KINDS[case.kind].said)
    if case.kind == "SIGSTOP":
        expected = ("stopped", "no stacks came")
    found, stacks = looked_into(case)
    assert found["slowest"] == case.victim, found
    rank = found["ranks"].pop(case.victim)
    assert (rank["rank"], rank["waited_for"]) == (case.victim, 1.0)
    assert rank["doing"] == expected[0]
    assert len(found["ranks"]) == case.ranks - 1
    for other in found["ranks"]:
        assert (other["doing"], other["waits_for"]) == ("waiting", [case.victim]), found
        assert other["operation"] in MOMENTS[case.moment].operations, found
    _, _, block = stacks.partition(f"process {rank['pid']}:")
    assert expected[1] in block.partition("\n\nrank ")[0] + "\n", stacks


def test_a_job_that_trains_is_shown_by_any_of_its_numbers():
    def look(launcher):
        first = json.loads(commands.chainermn("top", launcher, "--json").stdout)
        rank = first["ranks"][2]["pid"]
        shown = commands.chainermn("top", rank, "--sort", "waited_for")
        return launcher, first, shown.stdout, commands.chainermn("stacks", rank).stdout

    launcher, first, shown, stacks = while_running(look)
    assert (first["job"], first["slowest"], first["unseen"]) == (launcher, 1, [])
    assert [row["rank"] for row in first["ranks"]] == [0, 1, 2]
    for row in first["ranks"]:
        assert 1 < row["steps_per_second"] < 20.5, first
        # Each step has four; the two counts are read at once.
        assert row["examples_per_second"] == 4 * row["steps_per_second"], first
    assert first["ranks"][0]["waiting"] > first["ranks"][1]["waiting"]
    host = os.uname().nodename
    title, head, row, *_, last = shown.strip().splitlines()
    assert title.startswith(f"Job {launcher}: ")
    assert "script.py" in title
    assert "steps/s" in head
    assert row.split()[:2] == ["1", host], shown
    assert last.startswith(f"slowest: rank 1 on {host}, process ")
    for rank in range(3):
        assert f"rank {rank} on {host}, process " in stacks
    assert "Current thread (most recent call first):" in stacks


@pytest.mark.full
def test_on_a_terminal_it_is_refreshed_until_the_job_ends():
    def look(launcher):
        ours, theirs = pty.openpty()
        command = commands.start("top", launcher, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        shown = b""
        while shown.count(b"slowest: ") < 2:
            shown += os.read(ours, 1 << 16)
        return launcher, command, shown, ours

    launcher, command, shown, ours = while_running(look)
    said = command.communicate(timeout=commands.SECONDS)[1]
    os.close(ours)
    assert b"\x1b[2J" in shown  # the screen is cleared
    assert said == f"Error: job {launcher} has ended\n"
    assert command.returncode == 1


@pytest.mark.full
def test_a_monitor_that_is_stopped_is_named():
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
    # Others' tests may run jobs here.
    known = (
        "no job of process 1 is seen here; give",
        "no job of yours runs here whose",
    )
    assert any(said in done.stderr for said in known), done.stderr


@pytest.mark.full
def test_several_jobs_are_listed():
    def inner(second):
        return second, commands.chainermn("stacks"), commands.chainermn("top", 1)

    first, (second, done, other) = while_running(
        lambda job: (job, while_running(inner))
    )
    assert done.returncode == 2
    assert "2 jobs of yours run here; give the number of one" in done.stderr
    assert "no job of process 1 is seen here; give the number of one" in other.stderr
    for number in (first, second):
        assert f"  {number}  since " in done.stderr
        assert f"  {number}  " in other.stderr
