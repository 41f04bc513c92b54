"""Whether a job succeeded, who is blamed for one that did not, and what `explain` says of that."""

import re
import tomllib
from pathlib import Path

import pytest

from chainermn_tools.launch import verdict
from tests.support.tools.jobs import Event, JobOutput, find_lost, verdict_on

JOBS = tomllib.loads(Path(__file__).with_name("verdicts.toml").read_text())
STARTED = [Event(r, "started", {"pid": 100 + r, "host": f"h{r}"}) for r in range(2)]
# Where starting again can't help.
FINAL = ("all_leave", "mpiexec_of_another_mpi")


@pytest.mark.parametrize("name", JOBS)
def test_the_rank_that_failed_first_is_named_and_explain_has_the_same_advice(name):
    job = JOBS[name]
    events = [Event(each["rank"], each["kind"], each) for each in job.get("events", ())]
    tail = job.get("mpiexec", "").encode()
    output = JobOutput(job["status"], events=STARTED + events, tail=tail)
    output.lost = find_lost(tail)

    found = verdict.classify(output, 2)
    assert found.status == job["gives"]
    assert re.search(job["cause"], found.cause), found.cause
    assert found.success == (found.status == 0)
    assert found.restartable == (name not in FINAL)
    assert job.get("step", "") in found.next_step
    assert found.traceback == job.get("traceback", "")
    if not found.success:
        explained = verdict_on(f"chainermn launch: {found.message}\n")
        assert explained.next_step == found.next_step


UNKNOWN_HOST = b"ssh: Could not resolve hostname far: Name or service not known\n"


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (
            b"",
            "; mpiexec ended with status 255\nNext step: read what was printed",
        ),
        (
            UNKNOWN_HOST,
            r"\. No host with this name is known here.\n    .*getent hosts far",
        ),
    ],
)
def test_where_no_rank_started_it_is_told_why_and_starting_again_is_no_use(
    tail, message
):
    found = verdict.classify(JobOutput(status=255, tail=tail), 2)
    assert (found.success, found.restartable, found.status) == (False, False, 2)
    assert re.match(f"no rank started{message}", found.message, re.DOTALL)


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (1, "start it by the scheduler, tmux or nohup"),
        (2, "start it again"),
        (10, "find who sent it"),
        (15, "find who sent it"),
    ],
)
def test_a_signal_to_the_launch_has_its_own_next_step_in_explain_too(number, step):
    said = verdict.of_signal(number).message
    found = verdict_on(f"chainermn launch: {said}\n")
    assert found.next_step.startswith(f"Next step: {step}")
    assert said.endswith(found.next_step)
