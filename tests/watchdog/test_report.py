"""What is said of ranks that wait, and of those that they wait for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from chainermn_comm.watchdog.report import normalize_stacks, rank_list, report, warning
from tests.support.watchdog.watched_ranks import (
    ENDED,
    PART,
    Timeout,
    inside,
    job_of,
    outside,
    ranks,
    receiving,
)


def test_the_number_in_a_part_is_told_as_the_worlds():
    them = ranks(
        (outside(0),),
        receiving(0, 1, tag=3, sequence=0, of=PART, size=2),
        outside(1, 0, operation="", of=PART, size=2),
    )
    stalled = [(them[1], them[1].calls[0])]
    text = report(job_of(them), stalled, Timeout())
    assert "culprit: rank 2 (process 102 on here) is in no call" in text
    assert "rank 1 (process 101 on here) waits in recv (from rank 2, tag 3)" in text


def test_a_message_of_any_tag_is_said_to_be_one():
    them = ranks(receiving(0, 1, tag=-1), outside(1))
    text = report(job_of(them), [(them[0], them[0].calls[0])], Timeout())
    assert "waits in recv (from rank 1, any tag, " in text


def test_ranks_that_are_not_known_are_said_to_be():
    them = ranks(inside(0), inside(1))
    text = report(job_of(them), [(them[0], them[0].calls[0])], Timeout())
    assert "ranks wait for others that could not be asked." in text
    assert "not heard of: 1 of the 3 ranks that take part" in text


def test_hosts_that_do_not_answer_are_named():
    them = ranks(inside(0, 4), inside(1, 5))
    job = job_of(them, ["beta"])
    text = report(job, [(them[1], them[1].calls[0])], Timeout())
    assert "ranks wait for others that could not be asked; beta didn't answer" in text
    assert "culprit" not in text
    assert "; beta didn't answer" in warning(job, them[1], them[1].calls[0], 14.0)


def test_hosts_that_do_not_answer_are_named_when_ranks_wait_in_finalize():
    them = ranks(ENDED)
    text = report(job_of(them, ["rank 1 on beta"]), [(them[0], ENDED)], Timeout())
    assert (
        "ranks wait for others that could not be asked; rank 1 on beta didn't answer"
        in text
    )


def test_equal_stacks_are_printed_once_and_suspects_first():
    them = [
        replace(rank, stacks="elsewhere" if rank.world == 2 else "in bcast")
        for rank in ranks(inside(0), inside(1), outside(2))
    ]
    text = report(job_of(them), [(them[0], them[0].calls[0])], Timeout())
    assert text.index("Stacks of rank 2,") < text.index("Stacks of ranks 0, 1,")
    assert text.count("in bcast\n") == 1


@pytest.mark.parametrize("ends_job", [True, False])
def test_what_to_do_comes_last(ends_job):
    them = ranks(inside(0), outside(1))
    text = report(job_of(them), [(them[0], them[0].calls[0])], Timeout(2.0, ends_job))
    assert ("CHAINERMN_TIMEOUT is set: ending the job." in text) == ends_job
    assert text.splitlines()[-1].startswith("Next step: read its stack, the first")


def test_each_rank_is_at_the_innermost_line_of_the_users_own_code():
    frames = (
        "/x/lib/python3.11/queue.py",
        "/x/chainermn_comm/y.py",
        "/x/s.py",
        "/x/t.py",
    )
    stacks = "".join(
        f'  File "{file}", line {line} in f\n' for line, file in enumerate(frames)
    )
    them = [replace(rank, stacks=stacks) for rank in ranks(inside(0), outside(1))]
    text = report(job_of(them), [(them[0], them[0].calls[0])], Timeout())
    assert re.search(r"culprit: rank 1 .* is in no call .*, at s\.py:2\.\n", text)
    assert re.search(r"^  rank 0 .* waits in bcast .*, at s\.py:2\n", text, re.M)


def test_the_line_at_half_time_names_the_rank_that_is_waited_for():
    them = ranks(inside(0), outside(1))
    text = warning(job_of(them), them[0], them[0].calls[0], 14.0)
    assert "; rank 1 (process 101 on here) is in no call" in text
    assert text.endswith(". A report follows at 14.0 s.\n")


def test_frames_of_what_runs_the_script_are_left_out():
    run = (
        '  File "<frozen runpy>", line 88 in f\n'
        '  File "/x/chainermn_tools/rank.py", line 1 in g\n'
    )
    mine = 'Current thread 0x2 (most recent call first):\n  File "/x/s.py", line 5 in <module>\n'
    assert normalize_stacks((mine + run).encode()).splitlines()[1:] == [
        mine.splitlines()[1]
    ]


def test_the_main_threads_stack_comes_first_and_the_end_of_long_ones_is_cut():
    pool = (
        'Thread 0x1 (most recent call first):\n  File "/x/queue.py", line 1 in get\n\n'
    )
    main = 'Current thread 0x2 (most recent call first):\n  File "/x/s.py", line 5 in here\n'
    found = normalize_stacks((100 * pool + main).encode())
    assert found.startswith("Current thread (most recent call first):\n")
    assert "in here" in found
    assert len(found) == 4096


def test_of_many_ranks_the_first_are_listed():
    assert [rank_list(list(range(count))) for count in (1, 2)] == [
        "rank 0",
        "ranks 0, 1",
    ]
    assert rank_list(list(range(32))).endswith(" 31")
    assert rank_list(list(range(33))).endswith(" 31, ...")
