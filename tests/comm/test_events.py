"""Events that a process sends to `chainermn launch`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from _chainermn_events import event_line
from tests.support.jobs import runner
from tests.support.watchdog.events import ENVIRONMENT, LAUNCH, sent, the_only

EMIT = "import sys; from _chainermn_events import emit; emit('test', words=sys.argv[1])"
RANK_2 = {"PMI_RANK": "2", "PMI_SIZE": "3"}


def stderr_of(script, *arguments, environment):
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(
        command,
        env=runner.variables(environment),
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return result.stderr


@pytest.mark.parametrize(
    "words", ["", "é\n\x1e", "x" * 4000, ["x" * 1000, {"é": "é" * 450}]]
)
def test_an_event_is_a_line_that_a_pipe_carries_whole(words):
    line = event_line(LAUNCH, 7, "test", words=words)
    assert len(line) <= 4096
    assert line.count(b"\n") == 1
    event = {"version": 1, "event": "test", "rank": 7, "words": words}
    assert sent(line.decode()) == [event]


def test_an_event_that_is_too_long_is_not_sent():
    script = EMIT.replace("sys.argv[1]", "'x' * 5000") + "; emit('next')"
    (event,) = sent(stderr_of(script, environment=ENVIRONMENT))
    assert event["event"] == "next"


def test_an_event_has_its_kind_and_rank_and_goes_to_a_launcher_only():
    text = stderr_of(EMIT, "x", environment={**ENVIRONMENT, **RANK_2})
    assert sent(text) == [{"version": 1, "event": "test", "rank": 2, "words": "x"}]
    assert stderr_of(EMIT, "x", environment={}) == ""


def test_a_child_of_the_rank_does_not_speak_for_it():
    """Also where it was forked; but a rank of another launch that it started speaks."""
    script = f"""
import os, subprocess, sys
from _chainermn_events import emit
EMIT = {EMIT!r}
subprocess.run([sys.executable, "-c", EMIT, "of a child"], check=True)
if os.fork() == 0:
    emit("test", words="forked")
    os._exit(0)
os.wait()
other = {{**os.environ, "CHAINERMN_LAUNCH": "job-2"}}
subprocess.run([sys.executable, "-c", EMIT, "of another launch"], check=True, env=other)
emit("test", words="own")
"""
    text = stderr_of(script, environment=ENVIRONMENT)
    assert [event["words"] for event in sent(text)] == ["own"]
    assert "of another launch" in text


def test_an_event_reaches_the_launcher_whatever_the_script_did_to_its_standard_error():
    script = """
import os, sys
from _chainermn_events import emit
sys.stderr.close()
os.close(2)
emit("test")
"""
    assert the_only("test", stderr_of(script, environment=ENVIRONMENT))


def test_nothing_is_raised_where_nobody_listens():
    script = """
import os, sys
reading, writing = os.pipe()
os.dup2(writing, 2)
os.close(writing)
from _chainermn_events import emit
os.close(reading)
emit("test")
print("went on")
"""
    command = [sys.executable, "-c", script]
    assert (
        subprocess.check_output(command, env=runner.variables(ENVIRONMENT))
        == b"went on\n"
    )


def test_a_rank_can_import_it_before_the_script_without_loading_anything():
    script = """
import sys
import _chainermn_events
assert not {"chainermn_comm", "mpi4py", "numpy"} & sys.modules.keys()
"""
    assert stderr_of(script, environment=ENVIRONMENT) == ""
