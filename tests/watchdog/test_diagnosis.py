"""From what ranks do to whom the others wait for."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from chainermn_comm.watchdog.diagnosis import WaitGraph, rank_from_json
from tests.support.watchdog.watched_ranks import (
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


def root_causes(them):
    waiting = [(rank, one) for rank in them for one in rank.waits if rank.state != GONE]
    return [rank.world for rank in WaitGraph(them).root_causes(waiting)]


@pytest.mark.parametrize(
    ("them", "expected"),
    [
        (ranks(inside(0), outside(1), inside(2)), [1]),
        (ranks(inside(0), inside(1), outside(2)), [2]),
        # It has left the call that the others are still in.
        (ranks(inside(0), inside(1), outside(2, sequence=5)), []),
        (ranks(inside(0), inside(1), inside(2)), []),
        (ranks(inside(0), outside(1), outside(2), states={2: STOPPED}), [2, 1]),
        (
            ranks(inside(0), outside(1), outside(2), states={1: STOPPED, 2: GONE}),
            [2, 1],
        ),
        # Stopped in the very call.
        (ranks(inside(0), inside(1), inside(2), states={0: STOPPED}), [0]),
        (ranks(inside(0), inside(1), inside(2), states={1: GONE}), [1]),
        # Ended well, before the call or after it.
        (ranks(inside(0), (outside(1), ENDED), inside(2)), [1]),
        (ranks(inside(0), (outside(1, 5), ENDED), inside(2), states={1: GONE}), []),
        # Rank 0 waits for 1, which waits for 2.
        (ranks(receiving(0, 1), receiving(1, 2), outside(2)), [2]),
        (ranks(receiving(0, 1), sending(1, 0), outside(2)), [0, 1]),
        (ranks(receiving(0, 1, tag=1), sending(1, 0, tag=2), outside(2)), [0, 1]),
        (ranks(receiving(0, 1, tag=-1), sending(1, 0, tag=2), outside(2)), [0, 1]),
        (ranks(receiving(0, 1), receiving(1, 0), outside(2)), [0, 1]),
        (ranks(inside(0), receiving(1, 0), inside(2)), [1, 0]),
        # A call behind the others', which waits for a rank in no call.
        (ranks(inside(0), inside(1, 4), outside(2, 3)), [2]),
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
        (ranks((outside(0), ENDED), outside(1), (outside(2), ENDED)), [1]),
        # We know nothing of rank 2.
        (ranks(inside(0), inside(1)), []),
        # Rank 0 is late only because it waits for rank 2.
        (ranks(inside(0, 4), inside(1, 5)), []),
        (ranks(receiving(0, 2), inside(1)), [0]),
    ],
)
def test_suspects(them, expected):
    assert root_causes(them) == expected


def test_ranks_survive_the_way_to_another_monitor():
    them = ranks(inside(0), (outside(1), ENDED), receiving(2, 0), states={1: GONE})
    sent = json.dumps([asdict(rank) for rank in them])
    assert [rank_from_json(one) for one in json.loads(sent)] == them
