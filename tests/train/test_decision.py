"""What all ranks do, for every combination of what they report."""

from __future__ import annotations

from itertools import product

import pytest

from chainermn_train.optimizers.decision import (
    Decision,
    Report,
    decide,
    keeps_gradients,
)

SIZE = 3
NONE_SOME_ALL = (0, 1, SIZE)
COUNTED = [
    *("before_loss", "before_backward", "unshared", "changed", "apart", "cannot_count"),
    *("rescaled", "in_flight", "resend"),
]


def expected(total: Report, is_last: bool) -> Decision:
    """The table that `decide` stands for, a row a line: what holds, and what is done then."""
    news = total.unshared or total.changed or total.apart
    differ = news or 1 in (total.in_flight, total.before_loss)
    in_time = total.before_loss == SIZE and not total.cannot_count
    rows = [
        (total.rescaled and not total.apart, Decision.COMPARE_SETTINGS),
        (total.uneven and not news, Decision.COMPARE_SETTINGS),
        (differ and in_time, Decision.SYNCHRONIZE),
        (differ, Decision.START_AGAIN),
        (total.drifted, Decision.COMPARE_STATE),
        (total.before_loss, Decision.CONTINUE),
        (total.before_backward == SIZE, Decision.SEND),
        (total.before_backward or total.resend, Decision.RESEND),
        (not is_last, Decision.ADD),
        (True, Decision.STEP),
    ]
    return next(decision for holds, decision in rows if holds)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("drifted", [0, 1])
@pytest.mark.parametrize("uneven", [0, 1])
def test_every_combination_of_reports_has_its_row(is_last, drifted, uneven):
    seen = set()
    for counts in product(NONE_SOME_ALL, repeat=len(COUNTED)):
        total = Report(
            **dict(zip(COUNTED, counts, strict=True)), drifted=drifted, uneven=uneven
        )
        decision = decide(total, SIZE, is_last)
        if decision is not expected(total, is_last):
            pytest.fail(f"{decision} for {total}")
        seen.add(decision)
    always = {Decision.COMPARE_SETTINGS, Decision.SYNCHRONIZE, Decision.START_AGAIN}
    if uneven:
        assert seen == always
    elif drifted:
        assert seen == always | {Decision.COMPARE_STATE}
    else:
        unseen = {
            Decision.COMPARE_STATE,
            Decision.STEP if not is_last else Decision.ADD,
        }
        assert seen == set(Decision) - unseen


# Each row of the manual's and the decision record's words, by itself.
FIRST = {"before_loss": 3, "unshared": 3}
ROWS = {
    "nothing to say": ({}, Decision.STEP),
    "not the last of a group": ({"is_last": False}, Decision.ADD),
    "the first update": (
        {"before_loss": 3, "unshared": 3, "rescaled": 3},
        Decision.COMPARE_SETTINGS,
    ),
    "alike settings then": ({"before_loss": 3, "unshared": 3}, Decision.SYNCHRONIZE),
    "lazy parameters, or no loss on one": (
        {"before_loss": 3, "unshared": 3, "cannot_count": 1},
        Decision.START_AGAIN,
    ),
    "a link replaced on all": ({"before_loss": 3, "changed": 3}, Decision.SYNCHRONIZE),
    "a link replaced on one": ({"before_loss": 1, "changed": 1}, Decision.START_AGAIN),
    "a hook failed on one": ({"before_loss": 1, "apart": 1}, Decision.START_AGAIN),
    "and the step overflowed there": (
        {"before_loss": 1, "apart": 1, "rescaled": 1},
        Decision.START_AGAIN,
    ),
    "a flight on one only": ({"in_flight": 1}, Decision.START_AGAIN),
    "flights on all": ({"in_flight": 3}, Decision.STEP),
    "out of step in a group": ({"uneven": 1}, Decision.COMPARE_SETTINGS),
    "out of step since one has loaded": (
        {"uneven": 1, "before_loss": 1, "unshared": 1},
        Decision.START_AGAIN,
    ),
    "a checksum that differs": ({"drifted": 1}, Decision.COMPARE_STATE),
    "all can send": ({"before_backward": 3}, Decision.SEND),
    "one cannot": ({"before_backward": 2}, Decision.RESEND),
    "one sent something else": ({"resend": 1}, Decision.RESEND),
    "nothing new before the loss": ({"before_loss": 3}, Decision.CONTINUE),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_is_done_where(row):
    counts, decision = ROWS[row]
    is_last = counts.get("is_last", True)
    total = Report(
        **{name: count for name, count in counts.items() if name != "is_last"}
    )
    assert decide(total, SIZE, is_last) is decision


@pytest.mark.parametrize(
    ("counts", "keeps"),
    [
        ({"unshared": 3}, True),  # all begin or resume
        ({"unshared": 3, "in_flight": 3}, True),
        ({"unshared": 3, "in_flight": 1}, False),
        ({"unshared": 2, "changed": 1}, False),
        ({"unshared": 1}, False),
        ({"unshared": 3, "apart": 1}, False),
        ({"unshared": 3, "uneven": 1}, False),
        ({"changed": 3}, False),
        ({"apart": 3}, False),
    ],
)
def test_gradients_stay_only_where_all_ranks_begin_or_resume(counts, keeps):
    assert keeps_gradients(Report(**counts), SIZE) is keeps
