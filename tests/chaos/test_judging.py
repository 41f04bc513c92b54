"""The suite notices what it looks for: wrong words, late ends, things left, and missed figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from _chainermn_events import LEAVING_STATUS
from tests.support.jobs.runner import Job

from .faults import Case
from .judging import wrong
from .runs import Seen
from .trials import (
    BESIDE,
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
STOPPED = LOOPS.replace("in no call", "stopped")
SKIPS = """
errors.RankMismatchError: allreduce on rank 0: ranks disagree on operation: \
allreduce_grad on rank 1; allreduce on ranks 0, 2
"""
GONE = """
=   PID 101 RUNNING AT here
=   EXIT CODE: 9
"""
KILLED = """
ChainerMN: rank 1 (process 101 on here) is gone
"""
LEAVING = """
chainermn: a signal warned of the end; saved iteration 4
"""


def seen(err: str, returncode: int = 1) -> Seen:
    out = "RANK 0 100\nRANK 1 101\nRANK 2 102\n"
    return Seen(Job(returncode, out, err, ended=1.5), fault=1.0)


@pytest.mark.parametrize(
    ("kind", "right", "old", "new"),
    [
        ("exception", TRACEBACK, "rank 1", "rank 2"),
        ("exception", TRACEBACK, "in agree", "in main"),
        ("exception", TRACEBACK, "Traceback", LOOPS),
        (
            "exception",
            TRACEBACK,
            TRACEBACK,
            TRACEBACK.replace("k 1", "k 2") + TRACEBACK,
        ),
        ("SIGSTOP", STOPPED, "rank 1 (process 101", "rank 0 (process 100"),
        ("SIGSTOP", STOPPED, "stopped", "in no call"),
        ("SIGSTOP", STOPPED, "waits in allreduce", "waits in bcast"),
        ("loop", LOOPS, "loop_in_python", "elsewhere"),
        ("skip", SKIPS, "allreduce", "gather"),
        ("skip", SKIPS, "k 1; allreduce on ranks 0, 2", "k 2; allreduce on ranks 0, 1"),
        ("skip", SKIPS, SKIPS, LOOPS),
        ("SIGKILL", GONE, "101", "102"),
        ("SIGKILL", KILLED, "rank 1", "rank 2"),
        (
            "SIGKILL",
            GONE,
            GONE,
            GONE + KILLED.replace("1 (process 101", "2 (process 102"),
        ),
    ],
)
def test_words_that_name_another_rank_or_operation_are_noticed(kind, right, old, new):
    case = replace(CASE, kind=kind)
    assert wrong(case, seen(right)) == ""
    assert wrong(case, seen(""))
    assert old in right
    assert wrong(case, seen(right.replace(old, new)))


@pytest.mark.parametrize(
    ("kind", "said", "right", "misleading"),
    [
        ("loop", LOOPS, "likely culprit: rank 1 (process", "culprit: rank 2 (process"),
        (
            "loop",
            LOOPS.replace("culprit", "culprits, the likeliest first"),
            "likely culprits, the likeliest first: rank 1 (process",
            "likely culprits, the likeliest first: rank 2 (process",
        ),
        ("exception", TRACEBACK, "rank 1 on here failed", "rank 2 on here failed"),
        ("SIGKILL", "", "rank 1 on here was killed", "by rank 1 on here"),
    ],
)
def test_the_launcher_names_the_likeliest_culprit(kind, said, right, misleading):
    case = replace(CASE, kind=kind, launcher="launch")
    assert wrong(case, seen(f"{said}\nchainermn launch: {right}\n")) == ""
    assert wrong(case, seen(f"{said}\nchainermn launch: {misleading}\n"))


def test_ranks_that_a_signal_warns_leave_together():
    case = replace(CASE, kind="SIGTERM")
    assert wrong(case, seen(LEAVING, LEAVING_STATUS)) == ""
    assert wrong(case, seen("", LEAVING_STATUS))
    assert wrong(case, seen(GONE)) == ""  # before they listen
    assert wrong(case, seen(LEAVING))


RIGHT = Trial(CASE, seen(""), seconds={DEATH: 0.5, REPORT: 0.5, CUT: 30.0})
MISSED = [
    {"wrongs": {UNENDED: "status 0"}},
    {"wrongs": {MISNAMED: "rank 0 is blamed"}},
    {"wrongs": {LEFT: "/dev/shm/x"}},
    {"wrongs": {LOST: "it goes on from 3 though 6 was committed"}},
    {"wrongs": {BESIDE: "it was ended"}},
    {"seconds": {DEATH: 5.1}},
    {"seconds": {REPORT: 3.1}},
    {"seconds": {CUT: 41.0}},
]


def missed(*trials: Trial) -> list[int]:
    return [row for row, (*_, holds) in enumerate(figures(trials)) if not holds]


@pytest.mark.parametrize("row", range(len(MISSED)))
def test_each_figure_can_be_missed(row):
    assert missed(RIGHT) == []
    assert missed(RIGHT, replace(RIGHT, **MISSED[row])) == [row]


def test_a_job_that_was_faster_than_its_fault_counts_only_if_it_loses_something():
    faster = replace(RIGHT, happened=False, seconds={DEATH: 9.0})
    assert figures([RIGHT, faster]) == figures([RIGHT])
    assert missed(RIGHT, replace(faster, wrongs={LOST: "it ended otherwise"})) == [3]


@pytest.mark.parametrize(
    ("kind", "err", "happened"),
    [
        ("memory", "ChainerMN: shared memory could not be allocated on host 1", False),
        ("memory", "", True),
        ("exception", "Exception ignored in: <function>", False),
        ("SIGKILL", "ChainerMN: shared memory could not be allocated on host 1", True),
    ],
)
def test_a_job_that_gets_on_without_what_its_fault_took_is_no_failure(
    kind, err, happened
):
    case = replace(CASE, kind=kind, moment=None)
    trial = judged(case, seen(err, 0))
    assert (trial.happened, UNENDED in trial.wrongs) == (happened, happened)
