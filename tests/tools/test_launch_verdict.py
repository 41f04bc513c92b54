"""Whether a job succeeded, and who is blamed for one that did not."""

import re

import pytest

from chainermn_tools.launch import verdict
from tests.support.tools.explained import verdict_on
from tests.support.tools.launched import Event, JobOutput, LostProcess

STARTED = [Event(r, "started", {"pid": 100 + r, "host": f"h{r}"}) for r in range(2)]


def event(rank, kind, **fields):
    return Event(rank, kind, fields)


def finished(rank, size=2):
    return event(rank, "finished", size=size)


def failed(rank, what, status=1, secondary=False):
    fields = {"what": what, "status": status, "secondary": secondary}
    return event(rank, "failed", traceback=f"Traceback:\n{what}\n", **fields)


def output(*events, status=0, lost=(), tail=b""):
    return JobOutput(
        status=status, events=[*STARTED, *events], lost=list(lost), tail=tail
    )


def result_of(*events, **how):
    return verdict.classify(output(*events, **how), 2)


ENDED = [finished(0), finished(1)]
PEER = failed(0, "PeerError", 1, True)
KILLED = LostProcess(101, None, "h1", code=9, signal=9)
CODE_5 = LostProcess(101, None, "h1", code=5)
STRANGER = LostProcess(999, None, "h1", code=9)
PRTE = LostProcess(101, 1, "h1", signal=9)
PRTE_STRANGER = LostProcess(7, 1, "h1", signal=9)
PRTE_CODE = LostProcess(rank=1, code=5)
FIRST = LostProcess(100, None, "h0", code=15)
SEEN = event(
    0, "rank_lost", lost=1, pid=101, host="h1", how="is gone, last seen in allreduce"
)
ABORTED = event(1, "aborted", what="os._exit(3) before MPI was finalized", status=3)
EXITED = event(1, "exited", what="os._exit(0)", status=0)
SILENT = event(0, "host_lost", host="h1", reason="h1 hasn't answered", ends_job=False)
STALL = event(0, "watchdog_abort", reason="likely culprit: rank 1 (pro", how="is gone")
LEAVING = [event(0, "leaving"), event(1, "leaving")]
LEFT = [failed(0, "sys.exit(75)", 75), failed(1, "sys.exit(75)", 75)]


@pytest.mark.parametrize(
    "one",
    [
        output(*ENDED),
        output(finished(1, None), finished(0, None)),  # no MPI in the script
        output(finished(0)),  # an event got lost
        # A log of another job that a rank printed.
        output(finished(0), lost=[KILLED, PRTE_CODE]),
        output(SILENT, *ENDED),
    ],
)
def test_a_job_succeeds_when_mpiexec_says_so_and_no_rank_reports_a_failure(one):
    assert verdict.classify(one, 2) == verdict.JobResult(True, 0)


@pytest.mark.parametrize(
    ("one", "status", "text"),
    [
        (output(finished(0), status=1), 1, "of 2 ranks these .* without a report: 1;"),
        (output(status=1), 1, "of 2 ranks these ended without a report: 0, 1;"),
        (output(*ENDED, status=4), 4, "all ranks ended well, but mpiexec .* status 4"),
        (output(EXITED), 1, r"rank 1 on h1 failed first: os._exit\(0\)"),
        (output(ABORTED, status=3), 3, r"rank 1 on h1 failed first: os._exit\(3\) bef"),
        (output(ABORTED, EXITED, status=3), 3, r"rank 1 on h1 .*_exit\(3\) before"),
        (output(failed(1, "E: x", 3), status=3), 3, r"rank 1 on h1 .*: E: x \(exit st"),
        (output(failed(1, "E"), failed(0, "E")), 1, "rank 0 on h0 failed first: E "),
        (output(failed(1, "E"), failed(0, "F")), 1, "rank 1 on h1 failed first: E "),
        (output(PEER, failed(1, "E: x", 4)), 4, "rank 1 on h1 failed first: E: x"),
        (output(PEER), 1, "rank 0 on h0 failed first: PeerError"),
        (output(lost=[KILLED], status=9), 137, r"rank 1 on h1 .* signal 9 \(SIGKILL\)"),
        (
            output(lost=[CODE_5], status=5),
            5,
            "rank 1 on h1 failed first: exit status 5",
        ),
        (output(lost=[STRANGER], status=1), 1, "without a report"),
        (output(lost=[PRTE_STRANGER], status=1), 1, "without a report"),
        (output(lost=[PRTE], status=137), 137, "rank 1 on h1 .*: ended by signal 9"),
        (output(lost=[PRTE_CODE], status=5), 5, "rank 1 on h1 .*: exit status 5"),
        (output(PEER, lost=[PRTE], status=1), 137, "rank 1 on h1"),
        (output(failed(0, "E: x", 7), lost=[PRTE], status=1), 7, "rank 0 on h0 .*E: x"),
        # MPICH's mpiexec names the lowest rank that is dead.
        (output(SEEN, lost=[FIRST], status=15), 15, "rank 1 on h1 .*: gone, last seen"),
        (
            output(SEEN, lost=[KILLED], status=9),
            137,
            "rank 1 on h1 .*: ended by signal",
        ),
        (
            output(SEEN, status=11, tail=b"Fatal Python error: Segmentation fault\n"),
            11,
            "rank 1 on h1 failed first: Fatal Python error: Segmentation fault",
        ),
        # A stall, whose SIGTERM is no rank's fault.
        (
            output(STALL, lost=[FIRST], status=15),
            124,
            "^the watchdog ended the job: likely culprit: rank 1",
        ),
        # Status 75 only says that all ranks have saved and left.
        (output(LEFT[1], status=75), 1, r"rank 1 on h1 failed first: sys\.exit\(75\)"),
        (output(*LEFT, status=75), 1, r"rank 0 on h0 failed first: sys\.exit\(75\)"),
        (output(LEAVING[0], *LEFT, status=75), 1, "rank 0 on h0 failed first"),
    ],
)
def test_the_rank_that_failed_first_is_named(one, status, text):
    found = verdict.classify(one, 2)
    assert (found.success, found.restartable, found.status) == (False, True, status)
    assert re.search(text, found.cause), found.cause
    assert found.next_step.startswith("Next step: ")


def test_all_ranks_may_leave_together():
    found = result_of(*LEAVING, *LEFT, status=75)
    assert (found.success, found.restartable, found.status) == (False, False, 75)
    assert found.cause.startswith("all ranks have saved and left")


def test_a_traceback_is_shown_unless_the_rank_has_printed_it():
    error = failed(1, "E: x")
    assert "Traceback:" in result_of(error).cause
    assert "Traceback:" not in result_of(error, tail=b"Traceback:\nE: x\n").cause


UNKNOWN_HOST = b"ssh: Could not resolve hostname far: Name or service not known\n"


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        (
            b"",
            "no rank started; mpiexec's own message is above\nNext step: read mpiexec",
        ),
        (
            UNKNOWN_HOST,
            "no rank started. No host with this name is known here.\n    corr",
        ),
        (UNKNOWN_HOST, "\n    getent hosts far   # must print an address"),
    ],
)
def test_where_no_rank_started_it_is_told_why_and_starting_again_is_no_use(
    tail, message
):
    found = verdict.classify(JobOutput(status=255, tail=tail), 2)
    assert (found.success, found.restartable, found.status) == (False, False, 2)
    assert message in found.message


NO_EVENTS = JobOutput(status=255)
LONE = (
    "RuntimeError: a launcher started this as rank 0 of 2, but it is alone in its MPI."
)
LONE_LOG = (
    f"Traceback (most recent call last):\n{LONE}\n"
    "ChainerMN: rank 0 of 2: uncaught RuntimeError, ending the job."
)


@pytest.mark.parametrize(
    ("said", "step"),
    [
        (verdict.classify(NO_EVENTS, 2).message, "read mpiexec's own message above"),
        (
            result_of(finished(0, 1), finished(1, 1)).message,
            "use the mpiexec of mpi4py's MPI",
        ),
        (result_of(finished(0), status=1).message, "read what that rank printed"),
        (result_of(*ENDED, status=1).message, "read mpiexec's own message above"),
        (verdict.of_signal(1).message, "start it by the scheduler, tmux or nohup"),
        (verdict.of_signal(2).message, "nothing is wrong"),
        (verdict.of_signal(10).message, "find who sent it"),
        (verdict.of_signal(15).message, "find who sent it"),
        ("the job did not end within 3 s", "give it a longer --timeout"),
        ("mpiexec doesn't start: no such file", "read mpiexec's own message above"),
        (LONE_LOG, "use the mpiexec of mpi4py's MPI"),
    ],
)
def test_each_verdict_has_its_own_next_step_in_explain_too(said, step):
    log = said
    if said != LONE_LOG:
        log = f"chainermn launch: {said}\n"
    found = verdict_on(log)
    assert found.next_step.startswith(f"Next step: {step}")
    if "\nNext step: " in said:
        assert said.endswith(found.next_step)
