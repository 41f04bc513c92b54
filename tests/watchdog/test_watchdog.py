"""A call that waits too long is reported, with the rank that keeps it waiting first.

Ranks that are killed, or hold Python's lock, are in tests/chaos.
"""

from __future__ import annotations

import re

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support import jobs
from tests.support.explained import explained
from tests.support.processes import soon

# Short, and long enough for the ranks to be where they shall be, on a machine that is busy.
SECONDS = 3.0
JOB_SECONDS = 120.0  # ends a hang, no more

SCRIPT = (
    jobs.PRELUDE
    + """
import os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
from chainermn_comm import create_communicator
from tests.support.watchdog import communicator_within

def in_python():
    while True:
        pass

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def in_recv():
    comm.recv_obj(0, 5)

def raising_in_a_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    in_python()

def in_a_part():
    part.allreduce_obj(1)

def ended():
    sys.exit()

def asleep():
    time.sleep(3 * seconds)

def alone_then_elsewhere():
    from chainermn_comm.watchdog import alone
    with alone("download"):
        time.sleep(3 * float(os.environ["CHAINERMN_TIMEOUT"]))
    comm.bcast(np.ones(100, "f4"), root=1)
    in_python()

how, seconds = sys.argv[1], float(sys.argv[2])
print("RANK", os.getpid(), flush=True)
MPI.COMM_WORLD.Barrier()  # imports take their time, which no watchdog counts
if how == "first" and MPI.COMM_WORLD.rank == 1:
    in_python()
comm = communicator_within("naive", seconds) if seconds else create_communicator("naive")
part = comm.split(int(comm.rank == 2), 0)
for i in range(3):
    comm.allreduce(np.ones(10))
world = MPI.COMM_WORLD
world.Barrier()
culprit = world.size - 1 if how != "in_a_part" else 1
if how == "finalize":
    comm.finalize()
    if world.rank == 1:
        in_python()
    sys.exit()
if how == "create":
    if world.rank == 1:
        in_python()
    create_communicator("flat")
if world.rank == culprit:
    print("elsewhere", world.rank, flush=True)
    globals()[how]()
comm.bcast(np.ones(100, "f4"), root=1)
print("going on", flush=True)
if how == "alone_then_elsewhere":
    import chainermn.functions
    chainermn.functions.recv(comm, 1, tag=3)
"""
)


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(ranks, program, how, seconds=SECONDS):
    environment = {"CHAINERMN_TIMEOUT": f"{seconds:g}"}
    job = jobs.run(ranks, program, how, 0, environment=environment, seconds=JOB_SECONDS)
    assert job.returncode is not None, f"the job hung\n{job}"
    assert_no_monitor_stays(job)
    return job


def assert_no_monitor_stays(job):
    ranks = set(re.findall(r"RANK (\d+)", job.out))
    assert ranks, job
    assert soon(lambda: not monitors_of(ranks)), job


def monitors_of(ranks):
    """The command lines of those that watch these processes."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [
        words
        for words in lines
        if ranks & set(words) and any("chainermn_comm.watchdog.monitor" in word for word in words)
    ]


def said(job, *patterns):
    """Those patterns are found in the report, in that order."""
    start = job.err.find("ChainerMN: likely culprit")
    assert start >= 0, job
    for pattern in patterns:
        found = re.compile(pattern, re.M).search(job.err, start)
        assert found, f"{pattern!r} is missing\n{job}"
        start = found.end()


BCAST = r"^  rank 0 .* waits in bcast \(root 1, collective call 5\) for"


ELSEWHERE = "stalled-rank-elsewhere"


@pytest.mark.parametrize(
    ("ranks", "how", "where", "stack", "known"),
    [
        (3, "in_python", "is in no call", "in in_python", ELSEWHERE),
        (2, "stopped", "is stopped", None, "stalled-rank-stopped"),
        (2, "ended", "has ended and waits in MPI_Finalize", None, "stalled-rank-ended"),
        pytest.param(
            *(2, "raising_in_a_thread", "is in no call", "in raising_in_a_thread", ELSEWHERE),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_that_does_not_come_is_named_first_and_the_job_ends(
    ranks, how, where, stack, known, program
):
    job = run(ranks, program, how)
    assert job.returncode != 0, job
    culprit = rf"culprit: rank {ranks - 1} \(process \d+ on \S+\) {where}"
    said(job, culprit, BCAST, *(["^  rank 1 .* waits in bcast"] if ranks == 3 else []))
    said(job, rf"^Stacks of rank {ranks - 1}\b[\s\S]*?{stack}" if stack else "^Stacks")
    said(job, culprit, "^Stacks of ranks? 0", r"script\.py", "ending the job")
    assert job.err.count("likely culprit") == 1, job
    assert "A report follows at 3.0 s" in job.err
    assert "going on" not in job.out
    assert explained(job)[0] == known


@pytest.mark.full
def test_a_receive_that_nobody_answers(program):
    job = run(2, program, "in_recv")
    assert job.returncode != 0, job
    said(
        job, r"culprits.*: rank 1 .* waits in recv_obj \(from rank 0, tag 5, ", "or: rank 0", BCAST
    )
    assert explained(job)[0] == "stalled-ranks-wait-for-one-another"


@pytest.mark.full
def test_a_rank_in_another_communicators_call(program):
    # Rank 1 waits in the communicator of ranks 0 and 1 for rank 0, which waits for rank 1.
    job = run(3, program, "in_a_part")
    assert job.returncode != 0, job
    said(job, "culprits.*: rank 1 .* waits in allreduce_obj", "or: rank 0 .* waits in bcast")
    assert "rank 2 (process" in job.err


@pytest.mark.parametrize(
    ("how", "operation"),
    [
        ("finalize", "MPI_Finalize"),
        pytest.param("create", "create", marks=pytest.mark.full),
    ],
)
def test_waiting_outside_any_communicator(how, operation, program):
    job = run(2, program, how)
    assert job.returncode != 0, job
    said(
        job, "culprit: rank 1 .* is in no call", rf"^  rank 0 .* waits in {operation}", "in_python"
    )


def test_a_rank_that_does_not_come_to_make_the_first_communicator(program):
    job = run(3, program, "first")
    assert job.returncode != 0, job
    said(
        job,
        r"culprit: rank 1 \(process \d+ on \S+\) is in no call",
        "^  rank 0 .* waits in create_communicator",
        "^  rank 2 .* waits in create_communicator",
        "ending the job",
    )
    assert job.err.count("likely culprit") == 1, job
    assert "A report follows at 3.0 s" in job.err


def test_by_default_there_is_a_report_and_the_job_goes_on(program):
    # The script imposes what is 600 s by default.
    job = jobs.run(2, program, "asleep", 2.0, seconds=JOB_SECONDS)
    assert job.returncode == 0, job
    said(job, "culprit: rank 1 .* is in no call", "The ranks go on waiting")
    assert job.err.count("likely culprit") == 1, job
    assert job.out.count("going on") == 2, job
    assert_no_monitor_stays(job)


@pytest.mark.full
def test_work_that_a_rank_said_to_do_alone_is_waited_for_and_functions_are_named(program):
    job = run(2, program, "alone_then_elsewhere", 2)
    assert job.returncode != 0, job
    assert "going on" in job.out
    said(
        job,
        "culprit: rank 1 .* is in no call for .*, inside download for ",
        "The ranks go on waiting for it, 600 s at most",
        r"culprit: rank 1 \(process \d+ on \S+\) is in no call",
        r"^  rank 0 .* waits in recv \(from rank 1, tag 3, .* inside chainermn.functions: recv for",
        "ending the job",
    )


BAD_VALUES = ["soon", "-1", "0.5", "nan", "inf", "1e12"]
REFUSED = (
    jobs.PRELUDE
    + f"""
import os
from mpi4py import MPI
from chainermn_comm import RankMismatchError, create_communicator

def refused(value, error):
    os.environ["CHAINERMN_TIMEOUT"] = value
    try:
        create_communicator("naive")
    except error as found:
        print(f"REFUSED {{found}}\\n", end="", flush=True)

for value in {BAD_VALUES}:
    refused(value, ValueError)
refused(str(10 + MPI.COMM_WORLD.rank), RankMismatchError)
"""
)


def test_bad_values_and_values_that_differ_are_errors_on_all_ranks(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(REFUSED)
    job = jobs.run(2, path)
    assert job.returncode == 0, job
    refused = [
        line for line in job.out.splitlines() if line.startswith("REFUSED CHAINERMN_TIMEOUT")
    ]
    for value in BAD_VALUES:
        assert sum(f"got {value!r}" in line for line in refused) == 2, job
    for rank in range(2):
        told = f"on rank {rank}: ranks disagree on CHAINERMN_TIMEOUT: 10 s and the end on rank 0; "
        assert told in job.out, job
    assert explained(job)[0] == "bad-timeout"


@pytest.mark.parametrize(("ranks", "seconds"), [(1, ""), (2, "0")], ids=["one rank", "zero"])
def test_one_rank_or_no_time_out_costs_neither_a_monitor_nor_a_thread(ranks, seconds, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        jobs.PRELUDE
        + """
import psutil, threading
from chainermn_comm import create_communicator
threading.Thread.start = None  # nobody may start one
with create_communicator("naive") as comm:
    comm.allreduce_obj(1)
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    comm.allreduce_obj(1)
    watching = [words for words in lines if str(psutil.Process().pid) in words]
    assert not any("watchdog" in word for words in watching for word in words), watching
"""
    )
    job = jobs.run(ranks, path, environment={"CHAINERMN_TIMEOUT": seconds})
    assert job.returncode == 0, job
