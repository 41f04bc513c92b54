"""Whether a job succeeded, and who is blamed for one that did not."""

import re

import pytest

from chainermn_tools.launch import classification
from tests.support.tools.explained import verdict_on
from tests.support.tools.launched import Event, JobOutput, LostProcess

STARTED = [Event(r, "started", {"pid": 100 + r, "host": f"h{r}"}) for r in range(2)]


def output(*events, status=0, lost=(), tail=""):
    return JobOutput(
        status=status, events=[*STARTED, *events], lost=list(lost), tail=tail.encode()
    )


def finished(rank, size=2):
    return Event(rank, "finished", {"size": size})


def failed(rank, what, status=1, secondary=False):
    fields = {"what": what, "status": status, "secondary": secondary}
    return Event(rank, "failed", {**fields, "traceback": f"Traceback:\n{what}\n"})


def event(rank, kind, **fields):
    return Event(rank, kind, fields)


KILLED = LostProcess(101, None, "h1", code=9, signal=9)
CODE_5 = LostProcess(101, None, "h1", code=5)
OTHERS = LostProcess(999, None, "h1", code=9)
PRTE = LostProcess(101, 1, "h1", signal=9)
PRTE_OTHERS = LostProcess(7, 1, "h1", signal=9)
PRTE_CODE = LostProcess(rank=1, code=5)


def test_a_job_succeeds_when_mpiexec_says_so_and_no_rank_reports_a_failure():
    success = classification.JobResult(True, 0)
    assert classification.classify(output(finished(1), finished(0)), 2) == success
    # No MPI in the script; a lost event; and a log of another job that a rank printed.
    assert (
        classification.classify(output(finished(1, None), finished(0, None)), 2)
        == success
    )
    assert classification.classify(output(finished(0)), 2) == success
    assert (
        classification.classify(output(finished(0), lost=[KILLED, PRTE_CODE]), 2)
        == success
    )
    silent = event(
        0, "host_lost", host="h1", reason="h1 has not answered", ends_job=False
    )
    assert (
        classification.classify(output(silent, finished(0), finished(1)), 2) == success
    )
    assert not classification.classify(
        output(finished(1), finished(0), status=1), 2
    ).success


@pytest.mark.parametrize(
    ("one", "status", "text"),
    [
        (output(finished(0), status=1), 1, "rank 1 of 2 ended without saying goodbye"),
        (output(status=1), 1, "ranks 0, 1 of 2 ended without"),
        (
            output(event(1, "exited", what="os._exit(0)", status=0)),
            1,
            "rank 1 on h1 .*_exit.0",
        ),
        (
            output(failed(1, "ValueError: x", 3), status=3),
            3,
            "rank 1 on h1 failed first: ValueE",
        ),
        (
            output(failed(0, "PeerError", 1, True), failed(1, "E: x", 4)),
            4,
            "rank 1 on h1",
        ),
        (
            output(failed(0, "PeerError", 1, True)),
            1,
            "rank 0 on h0 failed first: PeerError",
        ),
        (output(lost=[KILLED], status=9), 137, "rank 1 on h1 .*SIGKILL"),
        (output(lost=[CODE_5], status=5), 5, "rank 1 on h1 failed first: exit st"),
        (output(lost=[OTHERS], status=1), 1, "without saying goodbye"),
        (output(lost=[PRTE_OTHERS], status=1), 1, "without saying goodbye"),
        (
            output(lost=[PRTE], status=137),
            137,
            "rank 1 on h1 failed first: ended by signal 9",
        ),
        (
            output(lost=[PRTE_CODE], status=5),
            5,
            "rank 1 on h1 failed first: exit status 5",
        ),
        (
            output(failed(0, "PeerError", 1, True), lost=[PRTE], status=1),
            137,
            "rank 1 on h1",
        ),
        (
            output(failed(0, "E: x", 7), lost=[PRTE], status=1),
            7,
            "rank 0 on h0 failed first: E: x",
        ),
    ],
)
def test_the_first_rank_that_failed_is_named(one, status, text):
    found = classification.classify(one, 2)
    assert (found.success, found.restartable, found.status) == (False, True, status)
    assert re.search(text, found.message), found.message


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            event(0, "watchdog_abort", reason="likely culprit: rank 1 (pro"),
            "likely culprit: rank",
        ),
        (
            event(0, "watchdog_abort", reason="h1 has not answered"),
            "h1 has not answered",
        ),
    ],
)
def test_of_ranks_that_the_watchdog_ends_none_is_blamed_for_that(said, text):
    lost = LostProcess(100, None, "h0", code=15)
    found = classification.classify(output(said, lost=[lost], status=15), 2)
    # And not 15, of an innocent rank.
    assert (found.success, found.status) == (False, 124)
    assert found.message.startswith(f"the watchdog ended the job: {text}")
    assert found.message.count("\nNext step: ") == 1


SEEN = event(
    0, "rank_lost", lost=1, pid=101, host="h1", how="is gone, last seen in allreduce"
)
LEFT = event(1, "aborted", what="os._exit(3) before MPI was finalized", status=3)


@pytest.mark.parametrize(
    ("events", "lost", "said", "status", "how"),
    [
        ([SEEN], LostProcess(100, code=11), 11, 11, "gone, last seen in allreduce"),
        ([SEEN], KILLED, 9, 137, "ended by signal 9 (SIGKILL)"),
        ([LEFT], None, 3, 3, "os._exit(3) before MPI was finalized"),
        (
            [LEFT, event(1, "exited", what="os._exit(3)", status=3)],
            *(None, 3, 3, "os._exit(3) before MPI was finalized"),
        ),
    ],
)
def test_the_rank_that_the_watchdog_or_its_own_hook_saw_ending_first_is_blamed(
    events, lost, said, status, how
):
    one = output(*events, status=said, lost=[lost] if lost else [])
    found = classification.classify(one, 2)
    who, step = found.message.split("\n")
    assert (who, found.status) == (f"rank 1 on h1 failed first: {how}", status)
    assert step.startswith("Next step: ")


def test_where_no_rank_began_it_is_told_why_if_known_and_starting_again_is_no_use():
    found = classification.classify(JobOutput(status=255), 2)
    assert (found.success, found.restartable, found.status) == (False, False, 2)
    assert found.message == "no rank began; what mpiexec printed above says why"
    said = b"ssh: Could not resolve hostname far: Name or service not known\nLaunch proxy failed.\n"
    found = classification.classify(JobOutput(status=255, tail=said), 2)
    assert (
        "no rank began. A host was named that this one doesn't know." in found.message
    )
    assert "\n    getent hosts" in found.message


LONE = [finished(0, 1), finished(1, 1)]


@pytest.mark.parametrize(
    ("message", "step"),
    [
        (
            classification.classify(JobOutput(status=255), 2).message,
            "do what mpiexec says",
        ),
        (
            classification.classify(output(*LONE), 2).message,
            "take the mpiexec of mpi4py's",
        ),
        (
            classification.classify(output(finished(0), status=1), 2).message,
            "read what that rank",
        ),
        (
            classification.classify(
                output(finished(0), finished(1), status=1), 2
            ).message,
            "do what mpiexec says",
        ),
        (
            classification.of_signal(1).message,
            "start it by the scheduler, tmux or nohup",
        ),
        (classification.of_signal(2).message, "nothing is wrong"),
        (classification.of_signal(10).message, "find who sent it"),
        (classification.of_signal(15).message, "find who sent it"),
        ("the job did not end within 3 s", "give --timeout more"),
        ("mpiexec doesn't start: no such file", "do what mpiexec says"),
        (
            "RuntimeError: a launcher started this as rank 0 of 2, but it is alone in its MPI.",
            "take the mpiexec of mpi4py's",
        ),
    ],
)
def test_each_verdict_has_its_own_next_step_in_explain_too(message, step):
    log = (
        message
        if message.startswith("RuntimeError")
        else f"chainermn launch: {message}\n"
    )
    if log == message:
        log = f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n{message}\n'
    verdict = verdict_on(log)
    assert verdict.next_step.startswith(f"Next step: {step}")
    if "\nNext step: " in message:
        assert message.endswith(verdict.next_step)
