"""What is said of ranks that wait, and of those that they wait for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from chainermn_comm.watchdog.report import normalize_stacks, report, warning
from tests.support.watchdog.records import (
    ENDED,
    PART,
    Timeout,
    inside,
    job_of,
    outside,
    ranks,
    receiving,
)

TIMEOUT = Timeout(600.0)
UNHEARD = "ranks wait for others that could not be asked"
STACK = """  File "/x/lib/python3.11/queue.py", line 0 in f
  File "/x/chainermn_comm/y.py", line 1 in f
  File "/x/s.py", line 2 in f
  File "/x/t.py", line 3 in f
"""


def said(them, silent=(), timeout=TIMEOUT):
    """The report of the last call of the first rank that waits."""
    waiting = next(rank for rank in them if rank.waits)
    stalled = [(waiting, waiting.waits[-1])]
    return report(job_of(them, silent), stalled, timeout).text


@pytest.mark.parametrize(
    ("them", "silent", "words"),
    [
        # The number in a part is told as the world's.
        (
            ranks(
                outside(0),
                receiving(0, 1, tag=3, sequence=0, of=PART, size=2),
                outside(1, 0, operation="", of=PART, size=2),
            ),
            [],
            [
                "culprit: rank 2 (process 102 on here) is in no call",
                "rank 1 (process 101 on here) waits in recv (from rank 2, tag 3)",
            ],
        ),
        (
            ranks(receiving(0, 1, tag=-1), outside(1)),
            [],
            ["waits in recv (from rank 1, any tag, "],
        ),
        (
            ranks(inside(0), outside(1, peer=0, operation="recv")),
            [],
            ["is in no call for 7.0 s, after recv (from rank 0, any tag, "],
        ),
        (ranks(inside(0), inside(1)), [], [f"\nChainerMN: {UNHEARD}."]),
        (
            ranks(inside(0, 4), inside(1, 5)),
            ["beta"],
            [f"\nChainerMN: {UNHEARD}; beta didn't answer"],
        ),
        (
            ranks(ENDED),
            ["rank 1 on beta"],
            [f"\nChainerMN: {UNHEARD}; rank 1 on beta didn't answer"],
        ),
    ],
    ids=[
        "a part",
        "any tag",
        "any tag before",
        "unknown",
        "silent",
        "silent in finalize",
    ],
)
def test_for_whom_ranks_wait_is_said(them, silent, words):
    text = said(them, silent)
    for each in words:
        assert each in text


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (receiving(1, 2), "is gone, last seen in recv (from rank 2, "),
        (outside(1), "is gone, last seen in no call, after bcast"),
    ],
)
def test_a_rank_that_is_gone_was_last_seen_in_its_call(second, words):
    first, other, third = ranks(inside(0), second, outside(2))
    text = said([first, replace(other, state="gone"), third])
    assert f"rank 1 (process 101 on here) {words}" in text


def test_equal_stacks_are_printed_once_and_suspects_first():
    them = [
        replace(rank, stacks="elsewhere" if rank.world == 2 else "in bcast")
        for rank in ranks(inside(0), inside(1), outside(2))
    ]
    text = said(them)
    assert text.index("Stacks of rank 2,") < text.index("Stacks of ranks 0, 1,")
    assert text.count("in bcast\n") == 1


@pytest.mark.parametrize("ends_job", [True, False])
def test_what_happens_next_comes_last(ends_job):
    text = said(ranks(inside(0), outside(1)), timeout=Timeout(2.0, ends_job))
    end = "CHAINERMN_TIMEOUT is set: ending the job."
    if not ends_job:
        end = "The ranks go on waiting. CHAINERMN_TIMEOUT=2 would end the job"
    assert text.splitlines()[-1].startswith(end)


def test_each_rank_is_at_the_innermost_line_of_the_users_own_code():
    text = said([replace(r, stacks=STACK) for r in ranks(inside(0), outside(1))])
    assert re.search(r"culprit: rank 1 .* is in no call .*, at s\.py:2\.\n", text)
    assert re.search(r"^  rank 0 .* waits in bcast .*, at s\.py:2\n", text, re.M)


@pytest.mark.parametrize(
    ("second", "silent", "words"),
    [
        (outside(1), [], "; rank 1 (process 101 on here) is in no call"),
        (inside(1), ["beta"], "; beta didn't answer"),
    ],
)
def test_the_line_at_half_time_names_the_rank_that_is_waited_for(second, silent, words):
    them = ranks(inside(0), second)
    text = warning(job_of(them, silent), them[0], them[0].calls[0], 14.0)
    assert words in text
    assert text.endswith(". A report follows at 14.0 s.\n")


def test_the_main_threads_stack_comes_first_and_the_end_of_long_ones_is_cut():
    pool = (
        'Thread 0x1 (most recent call first):\n  File "/x/queue.py", line 1 in get\n\n'
    )
    main = 'Current thread 0x2 (most recent call first):\n  File "/x/s.py", line 5 in here\n'
    found = normalize_stacks((100 * pool + main).encode())
    assert found.startswith("Current thread (most recent call first):\n")
    assert "in here" in found
    assert len(found) == 4096
