"""The doctor's frame: checks that hang, raise or need others, and programs that leave children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainermn_tools import program
from chainermn_tools.doctor.check import Answer, Check, Context, check, failed, ok, skipped, warning
from chainermn_tools.doctor.runner import Layer, examine
from chainermn_tools.environment.probe import Unavailable, in_child
from chainermn_tools.launch.hosts import from_list
from tests.support.processes import is_gone

# Ends a test that hangs; nothing here takes so long.
LIMIT_SECONDS = 60
LONG = 3600.0


def context(seconds: float = LIMIT_SECONDS, **asked) -> Context:
    return Context(time.monotonic() + seconds, **asked)


def layer(*checks: Check, name: str = "here", share: float = 1.0) -> Layer:
    return Layer(name, name, checks, share)


def of(answer: Answer, name: str = "one", needs: tuple[str, ...] = ()) -> Check:
    return Check(name, f"{name}?", lambda _: answer, needs)


def findings(*layers: Layer, seconds: float = LIMIT_SECONDS):
    return {one.name: one for one in examine(layers, context(seconds))}


def test_each_check_has_a_finding_in_its_order():
    answers = [ok("a", n=1), warning("b", "mend b"), failed("c", "mend c"), skipped("d")]
    checks = [of(answer, name) for name, answer in zip("wxyz", answers, strict=True)]
    found = list(examine([layer(*checks[:2]), layer(*checks[2:], name="live")], context()))
    assert [(one.layer, one.name, one.question) for one in found] == [
        ("here", "w", "w?"),
        ("here", "x", "x?"),
        ("live", "y", "y?"),
        ("live", "z", "z?"),
    ]
    assert [one.status for one in found] == ["ok", "warning", "failed", "skipped"]
    assert [one.fix for one in found] == [None, "mend b", "mend c", None]
    assert [one.details for one in found] == [{"n": 1}, {}, {}, {}]


def test_a_check_that_hangs_is_named_and_the_others_go_on():
    over = threading.Event()

    @check("hangs", "?")
    def hangs(_):
        over.wait(LIMIT_SECONDS)
        return ok("at last")

    began = time.monotonic()
    after = (of(ok("b"), "b", ("hangs",)), of(ok("bb"), "bb", ("b",)))
    slow = layer(hangs, *after, of(ok("c"), "c"), share=0.5)
    found = findings(slow, layer(of(ok("d"), "d"), of(ok("e"), "e", ("bb",))), seconds=2)
    over.set()
    assert time.monotonic() - began < LIMIT_SECONDS / 2
    assert {name for name, one in found.items() if one.status == "ok"} == {"c", "d"}
    assert found["hangs"].found == "no answer within 1 s"
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
    @check("raises", "?")
    def raises(_):
        raise error

    found = findings(layer(raises, of(ok("b"), "b")))
    assert found["raises"].status == "failed"
    assert said in found["raises"].found
    assert found["raises"].fix
    assert found["b"].status == "ok"


def test_a_program_that_takes_too_long_may_just_need_more_time():
    def look(_):
        return in_child(signal.pause, 0.5)  # of a module that is found from anywhere

    found = findings(layer(Check("slow", "?", look)))["slow"]
    assert (found.status, found.found) == ("failed", "python did not end within 0.5 s")
    assert "--timeout" in found.fix


def test_what_needs_a_failed_check_is_left_out_and_says_why():
    first = layer(of(failed("a", "mend"), "a"), of(warning("b", "mend"), "b"), of(skipped(""), "c"))
    rest = [of(ok(""), "d", ("a",)), of(ok(""), "e", ("d",)), of(ok(""), "f", ("b", "c"))]
    found = findings(first, layer(*reversed(rest), name="live"))
    assert found["d"].status == found["e"].status == "skipped"
    assert found["d"].details == found["e"].details == {"because": "a"}
    assert found["f"].status == "ok", "a warning, or nothing to look at, is no failure"


def test_what_needs_an_unknown_check_says_so():
    assert "'nonsense'" in findings(layer(of(ok(""), "a", ("nonsense",))))["a"].found


@given(st.text())
def test_what_programs_print_cannot_control_a_terminal(text):
    (found,) = examine([layer(of(failed(text, text)))], context())
    assert all(c.isprintable() or c == "\n" for c in found.found + str(found.fix))


def test_a_fact_is_found_out_once_for_all_checks():
    asked = []

    def fact(_):
        asked.append(1)
        time.sleep(0.05)
        raise Unavailable("none")

    def look(context):
        try:
            context.once(fact)
        except Unavailable as problem:
            return ok(str(problem))
        raise AssertionError

    found = findings(layer(*(Check(name, "?", look) for name in "abc")))
    assert [one.found for one in found.values()] == ["none"] * 3
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("ranks", "hosts", "a_host", "here"),
    [
        (None, "", None, None),
        (5, "", 5, 5),
        (None, "a:2,b:3", 3, 3),
        (None, "b,c", 1, None),
        (5, "a.site,b", 3, 3),
        (9, "a:2,b:3", 3, 3),
        (4, "localhost:4", 4, 4),
    ],
)
def test_ranks_of_one_machine(monkeypatch, ranks, hosts, a_host, here):
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    asked = context(ranks=ranks, hosts=from_list(hosts) if hosts else ())
    assert (asked.ranks_a_host(), asked.ranks_here()) == (a_host, here)


def test_a_program_gets_what_it_reads_and_says_how_it_ended():
    code = "import sys; print(sys.stdin.read()); print('so', file=sys.stderr); sys.exit(3)"
    ended = program.run([sys.executable, "-c", code], LIMIT_SECONDS, given=b"; echo $HOME 'x'")
    assert ended == program.Ended(3, "; echo $HOME 'x'\n", "so\n")
    merged = program.run([sys.executable, "-c", code], LIMIT_SECONDS, merged=True)
    assert (merged.err, sorted(merged.out.split())) == ("", ["so"])


def test_a_program_that_ignores_its_end_is_ended_with_all_that_it_started(tmp_path):
    script = f"""
trap '' TERM
setsid sh -c 'trap "" TERM; echo $$ >> {tmp_path}/pids; sleep {LONG}' &
echo $$ >> {tmp_path}/pids
while [ "$(wc -l < {tmp_path}/pids)" -lt 2 ]; do sleep 0.05; done
touch {tmp_path}/ready
sleep {LONG}
"""
    began = time.monotonic()
    ended = program.run(["sh", "-c", script], 2)
    assert ended.status is None
    assert time.monotonic() - began < LIMIT_SECONDS
    assert (tmp_path / "ready").exists()
    for pid in (tmp_path / "pids").read_text().split():
        assert is_gone(int(pid))


def test_what_a_program_leaves_behind_ends_with_it(tmp_path):
    ended = program.run(["sh", "-c", f"setsid sleep {LONG} & echo $!"], LIMIT_SECONDS)
    assert ended.status == 0
    assert is_gone(int(ended.out))


def test_at_the_end_no_program_is_left_and_none_is_started(monkeypatch):
    monkeypatch.setattr(program, "_closed", False)  # and again after this test
    begun, outcomes = threading.Event(), []

    def work():
        begun.set()
        outcomes.append(program.run(["sleep", str(LONG)], LONG))
        try:
            program.run(["true"], LONG)
        except OSError as problem:
            outcomes.append(problem.strerror)

    thread = threading.Thread(target=work, daemon=True)
    with program.leaving_none():
        thread.start()
        assert begun.wait(LIMIT_SECONDS)
        while not program._running:
            time.sleep(0.01)
        time.sleep(0.2)  # until it has really started
    thread.join(LIMIT_SECONDS)
    assert outcomes == [program.Ended(-9, "", ""), "no program is started any more"]
    with program.leaving_none():
        assert program.run(["true"], LIMIT_SECONDS).status == 0


def test_only_marked_processes_are_killed():
    environment = {**os.environ, "CHAINERMN_TEST_MARK": "other"}
    bystander = subprocess.Popen(["sleep", str(LONG)], env=environment)
    try:
        program.kill_marked("CHAINERMN_TEST_MARK", ("mine", "othe", "other2"))
        assert bystander.poll() is None
        program.kill_marked("CHAINERMN_TEST_MARK", ("mine", "other"))
        assert bystander.wait(LIMIT_SECONDS) == -9
    finally:
        bystander.kill()
