"""What all ranks do, for every combination of two kinds of rows."""

from __future__ import annotations

from itertools import product

import pytest

from chainermn_train.optimizers.agreement import (
    Action,
    Phase,
    Row,
    State,
    settle,
    settle_compared,
)

SOME = [
    Row(phase, state, can_count=can_count, must_resend=must_resend)
    for phase, state, can_count, must_resend in product(
        Phase, State, [False, True], [False, True]
    )
]
BEFORE, APART, NEW = Phase.BEFORE_LOSS, State.APART, State.NEW


def expected(one, other):
    """The table that `settle` stands for, a row a line: what holds, and what is done then."""
    both = [one, other]
    phases = {row.phase for row in both}
    are_unknown = any(row.state in (APART, NEW) for row in both)
    differ = are_unknown or (BEFORE in phases and phases != {BEFORE})
    can_count = phases == {BEFORE} and one.can_count and other.can_count
    rows = [
        (differ and can_count, Action.SHARE),
        (differ, Action.START_AGAIN),
        (State.ASSUMED in (one.state, other.state), Action.COMPARE),
        (len(phases) > 1 or one.must_resend or other.must_resend, Action.RESEND),
        (True, Action.GO_ON),
    ]
    return next(action for holds, action in rows if holds)


def test_all_do_what_the_table_says_whichever_rank_differs():
    seen = set()
    for one, other in product(SOME, SOME):
        action = expected(one, other)
        for rows in ([one, other, other], [one, other, one], [one, one, other]):
            assert settle(rows) is action, rows
        seen.add(action)
    assert seen == set(Action)


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
    usual = Row(Phase.READY, State.SHARED)
    assert settle([usual] * 3) is Action.GO_ON
    assert settle([usual, usual, usual._replace(**{field: 1})]) is action


def test_what_was_compared_is_settled_without_a_second_comparison():
    usual = Row(Phase.READY, State.SHARED)
    rows = [usual, usual._replace(state=State.ASSUMED, checksum=1, scaling=2, calls=3)]
    assert settle(rows) is Action.COMPARE
    assert settle_compared(rows, have_drifted=False) is Action.GO_ON
    assert settle_compared(rows, have_drifted=True) is Action.START_AGAIN
    early = [row._replace(phase=BEFORE, can_count=True) for row in rows]
    assert settle_compared(early, have_drifted=True) is Action.SHARE
