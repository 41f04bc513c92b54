"""From what ranks do to whom the others wait for."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest

from chainermn_comm.watchdog.diagnosis import WaitGraph, rank_from_json
from tests.support.watchdog.records import (
    ENDED,
    GONE,
    PART,
    STOPPED,
    inside,
    outside,
    ranks,
    receiving,
    sending,
)

# What ranks do from 0 on, and which are suspected in this order. `in` and `out` stand for
# the collective call that a rank is in or was in last, 5 and 4 unless another number
# follows; `from 1` and `to 1` for messages.
CASES = """
in, out, in: 1
in, in, out: 2
in, in, out 5: nobody, since rank 2 has left the call that the others are still in
in, in, in: nobody
in, out, out stopped: 2 1
in, out stopped, out gone: 2 1
in stopped, in, in: 0, in the very call
in, in gone, in: 1
from 1, from 2, out: 2, since rank 0 waits for 1, which waits for 2
from 1, to 0, out: 0 1
from 1, from 0, out: 0 1
in, from 0, in: 1 0
in, in 4, out 3: 2, since rank 1 is a call behind the others and waits for a rank in no call
in, in: nobody, as nothing is known of rank 2
in 4, in 5: nobody, since rank 0 is late only because it waits for rank 2
from 2, in: 0
"""
WORDS = re.compile(r"(in|out|from|to)(?: (\d))?(?: (stopped|gone))?")


def root_causes(them):
    waiting = [(rank, one) for rank in them for one in rank.waits if rank.state != GONE]
    return [rank.world for rank in WaitGraph(them).root_causes(waiting)]


@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_suspects(case):
    doing, _, expected = case.partition(": ")
    calls = []
    states = {}
    for rank, words in enumerate(doing.split(", ")):
        what, number, state = WORDS.fullmatch(words).groups()
        make = {"in": inside, "out": outside, "from": receiving, "to": sending}[what]
        arguments = []
        if number:
            arguments = [int(number)]
        calls.append(make(rank, *arguments))
        if state:
            states[rank] = {"stopped": STOPPED, "gone": GONE}[state]
    suspected = [int(rank) for rank in re.findall(r"\d", expected.partition(",")[0])]
    assert root_causes(ranks(*calls, states=states)) == suspected


@pytest.mark.parametrize(
    ("them", "expected"),
    [
        # Ended well, before the call or after it.
        (ranks(inside(0), (outside(1), ENDED), inside(2)), [1]),
        (ranks(inside(0), (outside(1, 5), ENDED), inside(2), states={1: GONE}), []),
        (ranks((outside(0), ENDED), outside(1), (outside(2), ENDED)), [1]),
        # Tags that don't match, or may.
        (ranks(receiving(0, 1, tag=1), sending(1, 0, tag=2), outside(2)), [0, 1]),
        (ranks(receiving(0, 1, tag=-1), sending(1, 0, tag=2), outside(2)), [0, 1]),
        # Two communicators: 0 waits for 1, which waits in the other one for 2, or for
        # 0.
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
    ],
)
def test_suspects_of_several_calls(them, expected):
    assert root_causes(them) == expected


def test_ranks_survive_the_way_to_another_monitor():
    them = ranks(inside(0), (outside(1), ENDED), receiving(2, 0), states={1: GONE})
    sent = json.dumps([asdict(rank) for rank in them])
    assert [rank_from_json(one) for one in json.loads(sent)] == them
