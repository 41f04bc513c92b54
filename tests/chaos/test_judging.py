"""The judge notices words that name another rank or another operation."""

from __future__ import annotations

import pytest

from tests.support.jobs.runner import Job

from .faults import Case
from .judging import wrong
from .runs import Seen

TRACEBACK = """
ChainerMN: rank 1 of 3: uncaught RuntimeError, ending the job.
Traceback (most recent call last):
  File "training.py", line 134, in agree
RuntimeError: planted
"""
STOPPED = """
ChainerMN: likely culprit: rank 1 (process 101 on here) is stopped for 4.1 s.
A call has waited for 4.1 s (CHAINERMN_TIMEOUT):
  rank 0 (process 100 on here) waits in allreduce (collective call 7) for 4.1 s
"""
SKIPS = """
errors.RankMismatchError: allreduce on rank 0: ranks disagree on operation: \
allreduce_grad on rank 1; allreduce on ranks 0, 2
"""
KILLED = """
ChainerMN: rank 1 (process 101 on here) is gone
"""


def seen(err):
    out = "RANK 0 100\nRANK 1 101\nRANK 2 102\n"
    return Seen(Job(1, out, err, ended=1.5), fault=1.0)


@pytest.mark.parametrize(
    ("kind", "right", "old", "new"),
    [
        ("exception", TRACEBACK, "rank 1", "rank 2"),
        ("exception", TRACEBACK, "in agree", "in main"),
        ("exception", TRACEBACK, "Traceback", STOPPED),
        ("SIGSTOP", STOPPED, "rank 1 (process 101", "rank 0 (process 100"),
        ("SIGSTOP", STOPPED, "waits in allreduce", "waits in bcast"),
        ("skip", SKIPS, "allreduce", "gather"),
        ("skip", SKIPS, "k 1; allreduce on ranks 0, 2", "k 2; allreduce on ranks 0, 1"),
        ("SIGKILL", KILLED, "rank 1", "rank 2"),
    ],
)
def test_words_that_name_another_rank_or_operation_are_noticed(kind, right, old, new):
    case = Case(kind, "collective", 4, ranks=3)
    assert wrong(case, seen(right)) == ""
    assert old in right
    assert wrong(case, seen(right.replace(old, new)))
