"""The suite notices what it looks for: wrong words, late ends, things left, and missed figures."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from . import table
from .cases import Case
from .grounds import MARK, Here
from .runs import Seen
from .trials import Trial
from .words import wrong

CASE = Case(-1, "exception", "collective", 4, 0.0, 1, 3, "flat", "mpiexec", 1, False)
PIDS = {0: 100, 1: 101, 2: 102}
TRACEBACK = """
ChainerMN: rank {} of 3: uncaught RuntimeError, ending the job.
Traceback (most recent call last):
  File "training.py", line 134, in {}
RuntimeError: planted
"""
REPORT = """
ChainerMN: likely culprit: rank {} (process {} on here) is {} for 4.1 s, after allreduce_grad.
A call has waited for 4.1 s (CHAINERMN_TIMEOUT):
  rank 0 (process 100 on here) waits in {} (collective call 7) for 4.1 s
Stacks of rank 1, innermost call first:
    Current thread (most recent call first):
      File "planting.py", line 46 in {}
Stacks of ranks 0, 2, innermost call first:
"""
MISMATCH = "errors.RankMismatchError: {} on rank 0: ranks disagree on operation: {}\n"
SKIPS = "allreduce_grad on rank 1; allreduce on ranks 0, 2"
LOST = """
=   PID {} RUNNING AT here
=   EXIT CODE: 9
"""


def job(err: str, returncode: int = 1) -> Seen:
    return Seen(returncode, err=err, pids=PIDS)


@pytest.mark.parametrize(
    ("kind", "right", "wrongs"),
    [
        (
            "exception",
            TRACEBACK.format(1, "agree"),
            ["", TRACEBACK.format(2, "agree"), TRACEBACK.format(1, "main")],
        ),
        (
            "SIGSTOP",
            REPORT.format(1, 101, "stopped", "allreduce", "f"),
            [
                "",
                REPORT.format(0, 100, "stopped", "allreduce", "f"),
                REPORT.format(1, 101, "in no call", "allreduce", "f"),
                REPORT.format(1, 101, "stopped", "bcast", "f"),
            ],
        ),
        (
            "loop",
            REPORT.format(1, 101, "in no call", "allreduce", "loop_in_python"),
            [REPORT.format(1, 101, "in no call", "allreduce", "elsewhere")],
        ),
        (
            "skip",
            MISMATCH.format("allreduce", SKIPS),
            [
                "",
                MISMATCH.format("bcast", "gather on rank 1; bcast on ranks 0, 2"),
                MISMATCH.format("allreduce", "allreduce_grad on rank 2; allreduce on ranks 0, 1"),
                REPORT.format(1, 101, "in no call", "allreduce", "f"),
            ],
        ),
        ("SIGKILL", LOST.format(101), ["", LOST.format(102)]),
    ],
)
def test_words_that_name_another_rank_or_operation_are_noticed(kind, right, wrongs):
    case = replace(CASE, kind=kind)
    assert wrong(case, job(right)) == ""
    for text in wrongs:
        assert wrong(case, job(text)), text


@pytest.mark.parametrize("head", ["likely culprit", "likely culprits, the likeliest first"])
def test_the_launcher_names_the_likeliest_culprit(head):
    """One or several: the first of them must be the right one."""
    case = replace(CASE, kind="loop", launcher="launch")
    report = REPORT.format(1, 101, "in no call", "allreduce", "loop_in_python")
    for rank, right in (1, True), (2, False):
        verdict = f"\nchainermn launch: the watchdog ended it: {head}: rank {rank} (process 1\n"
        found = wrong(case, job(report.replace("likely culprit", head) + verdict))
        assert (found == "") == right, found


def test_a_process_that_is_left_is_found_by_its_mark():
    words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with subprocess.Popen(words, env={MARK: "17"}, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert [one.pid for one in Here().processes("17", [])] == [process.pid]
            assert Here().processes("18", [process.pid]) == []  # it is no monitor
        finally:
            process.kill()


def test_a_segment_that_is_left_is_found_by_its_name():
    name = f"chainermn-chaos-{os.getpid()}"
    path = Path("/dev/shm", name)
    path.touch()
    try:
        assert Here().shared({name, "chainermn-chaos-no-such-file"}) == [str(path)]
        Here().remove(str(path))
        assert Here().shared({name}) == []
    finally:
        path.unlink(missing_ok=True)


RIGHT = Trial(CASE, job(""), death_seconds=0.5, report_seconds=0.5, cut_seconds=30.0)


@pytest.mark.parametrize(
    ("row", "trial"),
    [
        (0, replace(RIGHT, ended=False)),
        (1, replace(RIGHT, death_seconds=5.1)),
        (2, replace(RIGHT, report_seconds=3.1)),
        (3, replace(RIGHT, cut_seconds=41.0)),
        (4, replace(RIGHT, misnamed="rank 0 is blamed")),
        (5, replace(RIGHT, left=["/dev/shm/x"])),
        (6, replace(RIGHT, lost="it goes on from 3 though 6 was committed")),
    ],
)
def test_each_figure_can_be_missed(row, trial):
    assert all(each.holds for each in table.rows([RIGHT]))
    found = table.rows([RIGHT, trial])
    assert [index for index, each in enumerate(found) if not each.holds] == [row]
    assert table.text(found).count("MISSED") == 1


def test_one_of_fifty_reports_may_be_wrong_but_not_two():
    trials = [RIGHT] * 98 + [replace(RIGHT, misnamed="x")] * 2
    assert all(each.holds for each in table.rows(trials))
    assert not all(each.holds for each in table.rows([*trials[1:], trials[-1]]))


def test_a_job_that_was_faster_than_its_fault_counts_for_nothing():
    untimed = {"death_seconds": None, "report_seconds": None, "cut_seconds": None}
    faster = replace(RIGHT, happened=False, ended=False, **untimed)
    assert table.rows([RIGHT, faster]) == table.rows([RIGHT])
    # Unless it left or lost something.
    assert not table.rows([RIGHT, replace(faster, left=["/dev/shm/x"])])[5].holds
    assert not table.rows([RIGHT, replace(faster, lost="it ended otherwise")])[6].holds
