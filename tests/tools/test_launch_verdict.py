"""Whether a job was good, and who is blamed for one that was not."""

import re

import pytest

from chainermn_tools.launch import verdict
from chainermn_tools.launch.verdict import Outcome


def outcome(*said: tuple, status: int = 0, tail: str = "") -> Outcome:
    hellos = [(r, {"kind": "hello", "pid": 100 + r, "host": f"h{r}"}) for r in range(2)]
    return Outcome(status=status, records=[*hellos, *said], tail=tail.encode())


def bye(rank, size=2):
    return rank, {"kind": "goodbye", "size": size}


def failed(rank, what, status=1, echo=False):
    record = {"kind": "failed", "traceback": f"Traceback:\n{what}\n"}
    return rank, {**record, "what": what, "status": status, "echo": echo}


HYDRA = (
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
    "=   PID {pid} RUNNING AT h\n=   EXIT CODE: {code}\n=====\n"
)
KILLED = "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
PRTE = "prterun noticed that process rank 1 with PID 7 on node vm exited on\nsignal 9 (Killed).\n"
PRTE_CODE = "   Process name: [prterun-vm-21834@1,1]\n   Exit code:    5\n"


def test_a_job_is_good_when_all_said_goodbye_and_mpiexec_agrees():
    assert verdict.judge(outcome(bye(1), bye(0)), 2) == verdict.Verdict(True, 0)
    assert verdict.judge(outcome(bye(1, None), bye(0, None)), 2).good  # no MPI in the script
    assert not verdict.judge(outcome(bye(1), bye(0), status=1), 2).good


@pytest.mark.parametrize(
    ("one", "status", "text"),
    [
        (outcome(bye(0)), 1, "rank 1 of 2 ended without saying goodbye"),
        (outcome(), 1, "ranks 0, 1 of 2 ended without"),
        (outcome(failed(1, "ValueError: x", 3), status=3), 3, "rank 1 on h1 failed first: ValueE"),
        (outcome(failed(0, "PeerError", echo=True), failed(1, "E: x", 4)), 4, "rank 1 on h1"),
        (outcome(failed(0, "PeerError", echo=True)), 1, "rank 0 on h0 failed first: PeerError"),
        (outcome(tail=HYDRA.format(pid=101, code=9) + KILLED), 137, "rank 1 on h1 .*SIGKILL"),
        (outcome(tail=HYDRA.format(pid=101, code=5)), 5, "rank 1 on h1 failed first: exit st"),
        (outcome(tail=HYDRA.format(pid=999, code=9)), 1, "without saying goodbye"),
        (outcome(tail=PRTE), 137, "rank 1 on h1 failed first: ended by signal 9"),
        (outcome(tail=PRTE_CODE), 5, "rank 1 on h1 failed first: exit status 5"),
        (outcome(failed(0, "PeerError", echo=True), tail=PRTE), 137, "rank 1 on h1"),
        (outcome(failed(0, "E: x", 7), tail=PRTE), 7, "rank 0 on h0 failed first: E: x"),
    ],
)
def test_the_first_rank_that_failed_is_named(one, status, text):
    found = verdict.judge(one, 2)
    assert (found.good, found.again, found.status) == (False, True, status)
    assert re.search(text, found.text), found.text


REPORT = """
[0] ChainerMN: likely culprit: rank 1 (process 101 on h1) is stopped (SIGSTOP) for 5.0 s.
[0] A call has waited for 5.0 s (CHAINERMN_TIMEOUT):
[0] {}
"""
CUT = "ChainerMN: h1 has not answered for 20.0 s: the link is cut. Ending the ranks on h0\n"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (REPORT.format("CHAINERMN_TIMEOUT is set: ending the job."), "likely culprit: rank 1 (pro"),
        (CUT, "h1 has not answered for 20.0 s"),
        ("CHAINERMN_TIMEOUT is set: ending the job.", "see its report above"),
    ],
)
def test_of_ranks_that_the_watchdog_ends_none_is_blamed_for_that(said, text):
    found = verdict.judge(outcome(tail=said + HYDRA.format(pid=100, code=15)), 2)
    assert (found.good, found.status) == (False, 15)
    assert found.text.startswith(f"the watchdog ended the job: {text}")


GONE = "ChainerMN: rank 1 (process 101 on h1) is gone, last seen in allreduce\n"
LEFT = "ChainerMN: rank 1 of 2: os._exit(3) before MPI was finalized, ending the job.\n"
BY_9 = HYDRA.format(pid=101, code=9) + KILLED


@pytest.mark.parametrize(
    ("tail", "said", "status", "how"),
    [
        (GONE + HYDRA.format(pid=100, code=11), 11, 11, "it is gone, last seen in allreduce"),
        (GONE + BY_9, 0, 137, "ended by signal 9 (SIGKILL)"),
        (LEFT, 3, 3, "os._exit(3) before MPI was finalized"),
        (REPORT.format("The ranks go on waiting.") + BY_9, 0, 137, "ended by signal 9 (SIGKILL)"),
    ],
)
def test_the_rank_that_the_watchdog_or_its_own_hook_saw_ending_first_is_blamed(
    tail, said, status, how
):
    found = verdict.judge(outcome(tail=tail, status=said), 2)
    assert (found.text, found.status) == (f"rank 1 on h1 failed first: {how}", status)


def test_where_no_rank_began_it_is_told_why_if_known_and_starting_again_is_no_use():
    found = verdict.judge(Outcome(status=255), 2)
    assert (found.good, found.again, found.status) == (False, False, 255)
    assert found.text == "no rank began; what mpiexec printed above says why"
    said = b"ssh: Could not resolve hostname far: Name or service not known\nLaunch proxy failed.\n"
    found = verdict.judge(Outcome(status=255, tail=said), 2)
    assert "no rank began. A host was named that this one doesn't know." in found.text
    assert "\n    getent hosts" in found.text
