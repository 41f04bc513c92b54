"""The doctor's frame: checks that hang, raise or need others."""

from __future__ import annotations

import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tools.doctor import (
    Check,
    Context,
    Unavailable,
    call_in_subprocess,
    canned,
    failed,
    ok,
    run_checks,
    skipped,
    warning,
)

LIMIT_SECONDS = 60  # ends a test that hangs


def test_each_check_has_a_result_in_its_order():
    answers = [
        ok("a", n=1),
        warning("b", "mend b"),
        failed("c", "mend c"),
        skipped("d"),
    ]
    checks = [
        canned(name, answer) for name, answer in zip("wxyz", answers, strict=True)
    ]
    found = list(run_checks(checks[:2], checks[2:]).values())
    assert [tuple(vars(one).values()) for one in found] == [
        ("ok", "a", None, {"n": 1}, None, "w", "w?", "stage 1"),
        ("warning", "b", "mend b", {}, None, "x", "x?", "stage 1"),
        ("failed", "c", "mend c", {}, None, "y", "y?", "stage 2"),
        ("skipped", "d", None, {}, None, "z", "z?", "stage 2"),
    ]


@pytest.mark.ci
def test_a_check_that_hangs_is_named_and_the_others_go_on():
    over = threading.Event()

    hangs = Check("hangs", "?", lambda _: over.wait(LIMIT_SECONDS) and ok("at last"))
    after = [canned("b", None, "hangs"), canned("bb", None, "b"), canned("c")]
    found = run_checks(
        [hangs, *after], [canned("d"), canned("e", None, "bb")], seconds=16
    )
    over.set()
    assert {name for name, one in found.items() if one.status == "ok"} == {"c", "d"}
    assert found["hangs"].message == "no answer within 8 s"
    assert found["hangs"].hint
    assert "'hangs'" in found["b"].message
    for name in ("b", "bb", "e"):
        assert (found[name].status, found[name].blocked_by) == ("skipped", "hangs")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unavailable("no such thing"), "no such thing"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (SystemExit(3), "SystemExit: 3"),
        (OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_a_check_that_raises_fails_alone(error, said):
    found = run_checks([canned("raises", error), canned("b")])
    assert found["raises"].status == "failed"
    assert said in found["raises"].message
    assert found["raises"].hint
    assert found["b"].status == "ok"


def test_a_program_that_takes_too_long_may_just_need_more_time():
    # It calls a function of a module that is found from anywhere.
    slow = Check("slow", "?", lambda _: call_in_subprocess(signal.pause, 0.5))
    found = run_checks([slow])["slow"]
    assert (found.status, found.message) == (
        "failed",
        "python did not end within 0.5 s",
    )
    assert "--timeout" in found.hint


def test_what_needs_a_failed_check_is_left_out_and_says_why():
    said = {"a": failed("a", "mend"), "b": warning("b", "mend"), "c": skipped("")}
    rest = [canned("f", None, "b", "c"), canned("e", None, "d"), canned("d", None, "a")]
    found = run_checks([canned(name, answer) for name, answer in said.items()], rest)
    assert found["d"].status == found["e"].status == "skipped"
    assert found["d"].blocked_by == found["e"].blocked_by == "a"
    assert found["f"].status == "ok", "a warning, or nothing to look at, is no failure"
    assert "'nonsense'" in run_checks([canned("a", None, "nonsense")])["a"].message


@given(st.text())
def test_what_programs_print_cannot_control_a_terminal(text):
    found = run_checks([canned("one", failed(text, text))])["one"]
    assert all(c.isprintable() or c == "\n" for c in found.message + str(found.hint))


def test_a_fact_is_found_out_once_for_all_checks():
    asked = []
    all_here = threading.Barrier(3)

    @Context.cached
    def fact(_):
        asked.append(1)
        raise Unavailable("none")

    def look(context):
        all_here.wait(LIMIT_SECONDS)
        with pytest.raises(Unavailable) as raised:
            fact(context)
        return ok(str(raised.value))

    found = run_checks([Check(name, "?", look) for name in "abc"])
    assert [one.message for one in found.values()] == ["none"] * 3
    assert len(asked) == 1
