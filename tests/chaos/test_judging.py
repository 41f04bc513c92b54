"""The suite notices what it looks for: wrong words, late ends, things left, and missed figures."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from _chainermn_events import LEAVING_STATUS

from .faults import Case
from .judging import wrong
from .runs import MARK, Here, Seen
from .trials import (
    CUT,
    DEATH,
    LEFT,
    LOST,
    MISNAMED,
    REPORT,
    UNENDED,
    Trial,
    figures,
    judged,
)

CASE = Case("exception", "collective", 4, ranks=3)
TRACEBACK = """
ChainerMN: rank 1 of 3: uncaught RuntimeError, ending the job.
Traceback (most recent call last):
  File "training.py", line 134, in agree
RuntimeError: planted
"""
LOOPS = """
ChainerMN: likely culprit: rank 1 (process 101 on here) is in no call for 4.1 s.
A call has waited for 4.1 s (CHAINERMN_TIMEOUT):
  rank 0 (process 100 on here) waits in allreduce (collective call 7) for 4.1 s
Stacks of rank 1, innermost call first:
    Current thread (most recent call first):
      File "faults.py", line 46 in loop_in_python
Stacks of ranks 0, 2, innermost call first:
"""
SKIPS = """
errors.RankMismatchError: allreduce on rank 0: ranks disagree on operation: \
allreduce_grad on rank 1; allreduce on ranks 0, 2
"""
GONE = """
=   PID 101 RUNNING AT here
=   EXIT CODE: 9
"""


def seen(err: str) -> Seen:
    return Seen(1, err=err, pids={0: 100, 1: 101, 2: 102})


@pytest.mark.parametrize(
    ("kind", "right", "changes"),
    [
        ("exception", TRACEBACK, [("rank 1", "rank 2"), ("in agree", "in main")]),
        (
            "SIGSTOP",
            LOOPS.replace("in no call", "stopped"),
            [
                ("rank 1 (process 101", "rank 0 (process 100"),
                ("stopped", "in no call"),
                ("waits in allreduce", "waits in bcast"),
            ],
        ),
        ("loop", LOOPS, [("loop_in_python", "elsewhere")]),
        (
            "skip",
            SKIPS,
            [
                ("allreduce", "gather"),
                ("rank 1; allreduce on ranks 0, 2", "rank 2; on ranks 0, 1"),
            ],
        ),
        ("skip", SKIPS, [(SKIPS, LOOPS)]),
        ("SIGKILL", GONE, [("101", "102")]),
    ],
)
def test_words_that_name_another_rank_or_operation_are_noticed(kind, right, changes):
    case = replace(CASE, kind=kind)
    assert wrong(case, seen(right)) == ""
    assert wrong(case, seen(""))
    for old, new in changes:
        assert old in right
        assert wrong(case, seen(right.replace(old, new))), new


@pytest.mark.parametrize("launcher", ["mpiexec", "launch"])
def test_ranks_that_a_signal_warns_leave_together(launcher):
    case = replace(CASE, kind="SIGTERM", launcher=launcher)
    said = "chainermn: a signal warned of the end; saved iteration 4"
    verdict = "\nchainermn launch: all ranks have saved and left, as a signal warned of the end\n"
    assert wrong(case, replace(seen(said + verdict), returncode=LEAVING_STATUS)) == ""
    assert wrong(case, replace(seen(""), returncode=LEAVING_STATUS))
    early = (
        GONE
        if launcher == "mpiexec"
        else "\nchainermn launch: rank 1 on here failed first\n"
    )
    assert wrong(case, seen(early)) == ""
    assert wrong(case, seen(said + verdict))


@pytest.mark.parametrize(
    "head", ["likely culprit", "likely culprits, the likeliest first"]
)
def test_the_launcher_names_the_likeliest_culprit(head):
    """One or several: the first of them must be the right one."""
    case = replace(CASE, kind="loop", launcher="launch")
    for rank, right in (1, True), (2, False):
        verdict = f"\nchainermn launch: the watchdog ended it: {head}: rank {rank} (process 1\n"
        found = wrong(case, seen(LOOPS.replace("likely culprit", head) + verdict))
        assert (found == "") == right, found


def test_a_process_that_is_left_is_found_by_its_mark():
    words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(words, env={MARK: "17"}, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert [one.pid for one in Here().processes("17")] == [process.pid]
            assert Here().processes("18", (process.pid,)) == []  # it is no monitor
        finally:
            process.kill()


def test_a_segment_that_is_left_is_found_by_its_name():
    name = f"chainermn-chaos-{os.getpid()}"
    path = Path("/dev/shm", name)
    path.touch()
    try:
        assert Here().shared({name, "chainermn-chaos-no-such-file"}) == [path]
    finally:
        path.unlink()


RIGHT = Trial(CASE, seen(""), seconds={DEATH: 0.5, REPORT: 0.5, CUT: 30.0})
MISSED = [
    {"wrongs": {UNENDED: "by itself, non-zero"}},
    {"seconds": {DEATH: 5.1}},
    {"seconds": {REPORT: 3.1}},
    {"seconds": {CUT: 41.0}},
    {"wrongs": {MISNAMED: "rank 0 is blamed"}},
    {"left": 1, "wrongs": {LEFT: "/dev/shm/x"}},
    {"wrongs": {LOST: "it goes on from 3 though 6 was committed"}},
]


def missed(*trials: Trial) -> list[int]:
    return [row for row, (*_, holds) in enumerate(figures(trials)) if not holds]


@pytest.mark.parametrize("row", range(len(MISSED)))
def test_each_figure_can_be_missed(row):
    assert missed(RIGHT) == []
    assert missed(RIGHT, replace(RIGHT, **MISSED[row])) == [row]


def test_one_of_fifty_reports_may_be_wrong_but_not_two():
    misnamed = replace(RIGHT, wrongs={MISNAMED: "x"})
    assert missed(*[RIGHT] * 98, *[misnamed] * 2) == []
    assert missed(*[RIGHT] * 97, *[misnamed] * 3) == [4]


def test_a_job_that_was_faster_than_its_fault_counts_for_nothing_unless_it_loses_something():
    faster = replace(RIGHT, happened=False, wrongs={UNENDED: "x"}, seconds={DEATH: 9.0})
    assert figures([RIGHT, faster]) == figures([RIGHT])
    assert missed(RIGHT, replace(faster, left=1)) == [5]
    assert missed(RIGHT, replace(faster, wrongs={LOST: "it ended otherwise"})) == [6]


@pytest.mark.parametrize(
    ("kind", "err", "happened"),
    [
        (
            "memory",
            "ChainerMN: shared memory could not be allocated on some node; and so on",
            False,
        ),
        ("memory", "", True),
        ("exception", "Exception ignored in: <function>", False),
        (
            "SIGKILL",
            "ChainerMN: shared memory could not be allocated on some node",
            True,
        ),
    ],
)
def test_a_job_that_gets_on_without_what_its_fault_took_is_no_failure(
    kind, err, happened
):
    case = replace(CASE, kind=kind, moment=None)
    trial = judged(case, replace(seen(err), returncode=0, fault=1.0))
    assert (trial.happened, UNENDED in trial.wrongs) == (happened, happened)
