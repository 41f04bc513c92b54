"""What all ranks do, for every combination of two kinds of rows."""

from __future__ import annotations

from itertools import product

import pytest

from chainermn_train.optimizers.agreement import (
    Action,
    Phase,
    Row,
    settle,
    settle_compared,
)

BEFORE = Phase.BEFORE_LOSS
USUAL = Row(Phase.READY)
FLAGS = list(product([False, True], repeat=2))
SOME = [
    *[Row(BEFORE, is_new, can_count=can_count) for is_new, can_count in FLAGS],
    *[
        Row(phase, is_new)
        for phase in (Phase.BEFORE_BACKWARD, Phase.READY)
        for is_new in (False, True)
    ],
]


def expected(one, other):
    """The table that `settle` stands for, a row a line: what holds, and what is done then."""
    phases = {one.phase, other.phase}
    is_mixed = BEFORE in phases and phases != {BEFORE}
    differ = one.is_new or other.is_new or is_mixed
    rows = [
        (differ and one.can_count and other.can_count, Action.SHARE),
        (differ, Action.START_AGAIN),
        (len(phases) > 1, Action.RESEND),
        (True, Action.GO_ON),
    ]
    return next(action for holds, action in rows if holds)


def test_all_do_what_the_table_says_whichever_rank_differs():
    for one, other in product(SOME, SOME):
        for rows in ([one, other, other], [one, other, one], [one, one, other]):
            assert settle(rows) is expected(one, other), rows


@pytest.mark.parametrize(
    ("field", "action"),
    [
        ("calls", Action.COMPARE),
        ("scaling", Action.COMPARE),
        ("checksum", Action.COMPARE),
        ("in_flight", Action.START_AGAIN),
        ("terms", Action.GO_ON),
        ("can_plan", Action.GO_ON),
        ("is_warned", Action.GO_ON),
    ],
)
def test_what_one_rank_alone_has_is_settled(field, action):
    assert settle([USUAL, USUAL, USUAL._replace(**{field: 1})]) is action


def test_what_was_compared_is_settled_without_a_second_comparison():
    rows = [USUAL, USUAL._replace(checksum=1, scaling=2, calls=3)]
    assert settle_compared(rows, have_drifted=False) is Action.GO_ON
    assert settle_compared(rows, have_drifted=True) is Action.START_AGAIN
    early = [row._replace(phase=BEFORE, can_count=True) for row in rows]
    assert settle_compared(early, have_drifted=True) is Action.SHARE
