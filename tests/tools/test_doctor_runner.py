"""The doctor's frame: checks that hang, raise or need others."""

from __future__ import annotations

import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainermn_tools.doctor.runner import Unavailable
from tests.support.doctor import (
    call_in_subprocess,
    canned,
    check,
    examine,
    failed,
    ok,
    skipped,
    warning,
)

LIMIT_SECONDS = 60  # ends a test that hangs


def test_each_check_has_a_finding_in_its_order():
    answers = [ok("a", n=1), warning("b", "mend b"), failed("c", "mend c"), skipped("d")]
    checks = [canned(name, answer) for name, answer in zip("wxyz", answers, strict=True)]
    found = list(examine(checks[:2], checks[2:]).values())
    assert [tuple(vars(one).values()) for one in found] == [
        ("layer 1", "w", "w?", "ok", "a", None, {"n": 1}),
        ("layer 1", "x", "x?", "warning", "b", "mend b", {}),
        ("layer 2", "y", "y?", "failed", "c", "mend c", {}),
        ("layer 2", "z", "z?", "skipped", "d", None, {}),
    ]


def test_a_check_that_hangs_is_named_and_the_others_go_on():
    over = threading.Event()

    hangs = check("hangs", "?")(lambda _: over.wait(LIMIT_SECONDS) and ok("at last"))
    after = [canned("b", None, "hangs"), canned("bb", None, "b"), canned("c")]
    found = examine([hangs, *after], [canned("d"), canned("e", None, "bb")], seconds=10)
    over.set()
    assert {name for name, one in found.items() if one.status == "ok"} == {"c", "d"}
    assert found["hangs"].found == "no answer within 5 s"
    assert found["hangs"].fix
    assert "'hangs'" in found["b"].found
    for name in ("b", "bb", "e"):
        assert (found[name].status, found[name].details) == ("skipped", {"because": "hangs"})


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
    found = examine([canned("raises", error), canned("b")])
    assert found["raises"].status == "failed"
    assert said in found["raises"].found
    assert found["raises"].fix
    assert found["b"].status == "ok"


def test_a_program_that_takes_too_long_may_just_need_more_time():
    # It calls a function of a module that is found from anywhere.
    slow = check("slow", "?")(lambda _: call_in_subprocess(signal.pause, 0.5))
    found = examine([slow])["slow"]
    assert (found.status, found.found) == ("failed", "python did not end within 0.5 s")
    assert "--timeout" in found.fix


def test_what_needs_a_failed_check_is_left_out_and_says_why():
    said = {"a": failed("a", "mend"), "b": warning("b", "mend"), "c": skipped("")}
    rest = [canned("f", None, "b", "c"), canned("e", None, "d"), canned("d", None, "a")]
    found = examine([canned(name, answer) for name, answer in said.items()], rest)
    assert found["d"].status == found["e"].status == "skipped"
    assert found["d"].details == found["e"].details == {"because": "a"}
    assert found["f"].status == "ok", "a warning, or nothing to look at, is no failure"
    assert "'nonsense'" in examine([canned("a", None, "nonsense")])["a"].found


@given(st.text())
def test_what_programs_print_cannot_control_a_terminal(text):
    found = examine([canned("one", failed(text, text))])["one"]
    assert all(c.isprintable() or c == "\n" for c in found.found + str(found.fix))


def test_a_fact_is_found_out_once_for_all_checks():
    asked = []
    all_here = threading.Barrier(3)

    def fact(_):
        asked.append(1)
        raise Unavailable("none")

    def look(context):
        all_here.wait(LIMIT_SECONDS)
        with pytest.raises(Unavailable) as raised:
            context.once(fact)
        return ok(str(raised.value))

    found = examine([check(name, "?")(look) for name in "abc"])
    assert [one.found for one in found.values()] == ["none"] * 3
    assert len(asked) == 1
