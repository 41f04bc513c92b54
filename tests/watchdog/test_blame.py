"""From what ranks do to whom the others wait for."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from chainermn_comm.watchdog.blame import Job, Rank, from_answer
from chainermn_comm.watchdog.processes import GONE, RUNNING, STOPPED
from chainermn_comm.watchdog.records import (
    COLLECTIVE,
    EVERYBODY,
    FINALIZE,
    MESSAGE,
    NOBODY,
    OUTSIDE,
    Call,
)
from chainermn_comm.watchdog.report import report, warning

WORLD, PART = (0, 1), (0, 2)


def call(rank, state, sequence=5, peer=NOBODY, tag=NOBODY, operation="bcast", of=WORLD, size=3):
    return Call(of, rank, size, state, 7.0, sequence, 0, peer, tag, operation)


def inside(rank, sequence=5, **options):
    return call(rank, COLLECTIVE, sequence, **options)


def outside(rank, sequence=4, **options):
    return call(rank, OUTSIDE, sequence, **options)


def receiving(rank, source, tag=0, sequence=4):
    return call(rank, MESSAGE, sequence, source, tag, "recv")


def sending(rank, dest, tag=0, sequence=4):
    return call(rank, MESSAGE, sequence, dest, tag, "send")


def ranks(*calls, states=None):
    return [
        Rank(
            world,
            "here",
            100 + world,
            (states or {}).get(world, RUNNING),
            those if isinstance(those, tuple) else (those,),
        )
        for world, those in enumerate(calls)
    ]


def suspects(them):
    job = Job(them)
    waiting = [(rank, one) for rank in them for one in rank.waits if rank.state != GONE]
    return [rank.world for rank in job.suspects(waiting)]


ended = call(0, COLLECTIVE, 0, operation=FINALIZE, of=EVERYBODY, size=1)


@pytest.mark.parametrize(
    ("them", "expected"),
    [
        (ranks(inside(0), outside(1), inside(2)), [1]),
        (ranks(inside(0), inside(1), outside(2)), [2]),
        # It has left the call that the others are still in.
        (ranks(inside(0), inside(1), outside(2, sequence=5)), []),
        (ranks(inside(0), inside(1), inside(2)), []),
        (ranks(inside(0), outside(1), outside(2), states={2: STOPPED}), [2, 1]),
        (ranks(inside(0), outside(1), outside(2), states={1: STOPPED, 2: GONE}), [2, 1]),
        # Stopped in the very call.
        (ranks(inside(0), inside(1), inside(2), states={0: STOPPED}), [0]),
        (ranks(inside(0), inside(1), inside(2), states={1: GONE}), [1]),
        # Ended well, before the call or after it.
        (ranks(inside(0), (outside(1), ended), inside(2)), [1]),
        (ranks(inside(0), (outside(1, 5), ended), inside(2), states={1: GONE}), []),
        # Rank 0 waits for 1, which waits for 2.
        (ranks(receiving(0, 1), receiving(1, 2), outside(2)), [2]),
        (ranks(receiving(0, 1), sending(1, 0), outside(2)), []),
        (ranks(receiving(0, 1, tag=1), sending(1, 0, tag=2), outside(2)), [0, 1]),
        (ranks(receiving(0, 1), receiving(1, 0), outside(2)), [0, 1]),
        (ranks(inside(0), receiving(1, 0), inside(2)), [1, 0]),
        # A call behind the others', which waits for a rank in no call.
        (ranks(inside(0), inside(1, 4), outside(2, 3)), [2]),
        # Two communicators: 0 waits for 1, which waits in the other one for 2, or for 0.
        (
            ranks(
                (inside(0), outside(0, 0, of=PART)),
                (outside(1), inside(1, 1, of=PART)),
                (outside(2), outside(2, 0, of=PART)),
            ),
            [2],
        ),
        (
            ranks(
                (inside(0), outside(0, 0, of=PART)),
                (outside(1), inside(1, 1, of=PART)),
            ),
            [1, 0],
        ),
        (ranks((outside(0), ended), outside(1), (outside(2), ended)), [1]),
        # We know nothing of rank 2.
        (ranks(inside(0), inside(1)), []),
        (ranks(receiving(0, 2), inside(1)), [0]),
    ],
)
def test_suspects(them, expected):
    assert suspects(them) == expected


def test_the_number_in_a_part_is_told_as_the_worlds():
    them = ranks(
        (outside(0),),
        call(0, MESSAGE, 0, 1, 3, "recv", of=PART, size=2),
        call(1, OUTSIDE, 0, operation="", of=PART, size=2),
    )
    stalled = [(them[1], them[1].calls[0])]
    text = report(Job(them), stalled, "Going on.")
    assert "culprit: rank 2 (process 102 on here) is in no call" in text
    assert "rank 1 (process 101 on here) waits in recv (from rank 2, tag 3)" in text


def test_ranks_that_are_not_known_are_said_to_be():
    them = ranks(inside(0), inside(1))
    text = report(Job(them), [(them[0], them[0].calls[0])], "Going on.")
    assert "see the reports of other machines" in text
    assert "not heard of: 1 of the 3 ranks that take part" in text


def test_hosts_that_do_not_answer_are_named_and_no_rank_is_blamed_for_them():
    # Rank 0 is late only because it waits for rank 2, whose host is cut off.
    them = ranks(inside(0, 4), inside(1, 5))
    job = Job(them, ["beta"])
    assert job.suspects([(them[1], them[1].calls[0])]) == []
    text = report(job, [(them[1], them[1].calls[0])], "Going on.")
    assert "ranks wait for others that could not be asked; beta didn't answer" in text
    assert "culprit" not in text
    assert "; beta didn't answer" in warning(job, them[1], them[1].calls[0], 14.0)


def test_hosts_that_do_not_answer_are_named_when_ranks_wait_in_finalize():
    ended = call(0, COLLECTIVE, 0, operation=FINALIZE, of=EVERYBODY, size=1)
    them = ranks(ended)
    text = report(Job(them, ["rank 1 on beta"]), [(them[0], ended)], "Going on.")
    assert "ranks wait for others that could not be asked; rank 1 on beta didn't answer" in text


def test_who_runs_something_else_inside_of_the_call_that_all_are_in_is_blamed():
    ours = (
        'Current thread (most recent call first):\n  File "/x/chainermn_comm/a.py", line 5 in f\n'
    )
    handler = 'Current thread (most recent call first):\n  File "/x/s.py", line 53 in hold\n'
    stacks = [ours, handler + ours.partition("\n")[2], ours]
    them = [replace(one, stacks=stacks[one.world]) for one in ranks(*map(inside, range(3)))]
    stalled = [(one, one.calls[0]) for one in them]
    text = report(Job(them), stalled, "Going on.")
    assert (
        "culprit: rank 1 (process 101 on here) waits in bcast (collective call 5) for 7.0" in text
    )
    assert " s, but runs hold (s.py, line 53) there.\n" in text
    assert text.index("Stacks of rank 1") < text.index("Stacks of ranks 0, 2")
    # Not where it holds for all, nor where others are not known.
    alike = Job(replace(one, stacks=handler) for one in them)
    assert "all ranks are in the call" in report(alike, stalled, "Going on.")
    assert "culprit" not in report(Job(them[:2]), stalled, "Going on.")


def test_equal_stacks_are_printed_once_and_suspects_first():
    them = [
        replace(rank, stacks="elsewhere" if rank.world == 2 else "in bcast")
        for rank in ranks(inside(0), inside(1), outside(2))
    ]
    text = report(Job(them), [(them[0], them[0].calls[0])], "Going on.")
    assert text.index("Stacks of rank 2,") < text.index("Stacks of ranks 0, 1,")
    assert text.count("in bcast\n") == 1


def test_ranks_survive_the_way_to_another_monitor():
    them = ranks(inside(0), (outside(1), ended), receiving(2, 0), states={1: GONE})
    sent = json.dumps({"ranks": [asdict(rank) for rank in them]})
    assert from_answer(json.loads(sent)) == them
