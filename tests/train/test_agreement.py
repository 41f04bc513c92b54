"""What all ranks do, by what one rank has and what the others have."""

from __future__ import annotations

import pytest

from chainermn_train.optimizers.agreement import Action, Row, settle

TABLE = [
    ({}, {}, Action.GO_ON),
    ({"can_share_first": True}, {}, Action.GO_ON),
    ({"can_plan": True}, {}, Action.GO_ON),
    ({"is_warned": True}, {}, Action.GO_ON),
    ({"num_added": 1}, {}, Action.GO_ON),
    ({"can_send": True}, {"can_send": True}, Action.GO_ON),
    ({"can_send": True}, {}, Action.RESEND),
    ({"num_calls": 1}, {}, Action.COMPARE),
    ({"scaling": 1}, {}, Action.COMPARE),
    ({"checksum": 1}, {"can_send": True}, Action.COMPARE),
    ({"in_flight": True}, {"checksum": 1}, Action.START_AGAIN),
    ({"needs_sharing": True}, {"checksum": 1, "can_send": True}, Action.START_AGAIN),
    ({"needs_sharing": True, "can_share_first": True}, {}, Action.START_AGAIN),
    (
        {"needs_sharing": True, "can_share_first": True},
        {"can_share_first": True},
        Action.SHARE,
    ),
]


@pytest.mark.parametrize(("one", "others", "action"), TABLE)
@pytest.mark.parametrize("rank", range(3))
def test_all_do_what_the_table_says_whichever_rank_differs(one, others, action, rank):
    rows = [Row(**others)] * 3
    rows[rank] = Row(**one)
    assert settle(rows) is action


def test_what_was_compared_is_settled_without_a_second_comparison():
    rows = [Row(), Row(checksum=1, scaling=2, num_calls=3)]
    assert settle(rows, were_compared=True) is Action.GO_ON
    rows.append(Row(can_send=True))
    assert settle(rows, were_compared=True) is Action.RESEND
