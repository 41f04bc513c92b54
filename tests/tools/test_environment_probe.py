"""Questions that fail, hang or have no answer."""

from __future__ import annotations

import threading

import pytest

from chainermn_tools.environment import probe


def test_one_probe_that_fails_or_hangs_leaves_the_others():
    never = threading.Event()

    def exits():
        raise SystemExit(3)

    def has_no_answer():
        raise probe.Unavailable("there is none")

    found = probe.together(
        {
            "good": lambda: 1,
            "hangs": never.wait,
            "fails": lambda: 1 / 0,
            "exits": exits,
            "none": has_no_answer,
        },
        seconds=1,
    )
    never.set()
    assert list(found) == ["good", "hangs", "fails", "exits", "none"]
    assert found["good"] == 1
    assert found["hangs"] == {"unavailable": "no answer within 1 s"}
    assert found["fails"] == {"unavailable": "ZeroDivisionError: division by zero"}
    assert found["exits"] == {"unavailable": "SystemExit: 3"}
    assert found["none"] == {"unavailable": "there is none"}


@pytest.mark.parametrize(
    ("printed", "quoted"),
    [
        ("", ""),
        ("-----\nno\n  luck\n-----", ": no luck"),
        ("first " + "x" * 500 + " last", f": first {'x' * 194} ... {'x' * 195} last"),
    ],
)
def test_a_failure_is_quoted_on_one_line(printed, quoted):
    assert probe._quote(printed) == quoted
