"""A call that waits too long is reported, with the rank that keeps it waiting first."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time

import psutil  # type: ignore[import-untyped]
import pytest

from chainermn_tools.explain import search
from tests.support import jobs

# Short, and long enough for the ranks to be where they shall be, on a machine that is busy.
SECONDS = 4.0
# From then on, to the end of the job; only jobs that never end take longer.
JOB_SECONDS = 60.0

SCRIPT = (
    jobs.PRELUDE
    + """
import ctypes, os, signal, sys, threading, time
import numpy as np
from mpi4py import MPI
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.watchdog import Limit

def in_python():
    while True:
        pass

def in_c():
    while True:  # a signal ends it
        ctypes.PyDLL(None).sleep(1000)

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

def killed():
    os.kill(os.getpid(), 9)

def aborting_in_vain():
    # As after a cut link: MPI_Abort has been called, and all is as before.
    from chainermn_comm import watchdog
    watchdog.aborting()
    in_python()

def asleep():
    time.sleep(3 * seconds)

def alone_then_elsewhere():
    from chainermn_comm.watchdog import alone
    with alone("download"):
        time.sleep(3 * float(os.environ["CHAINERMN_TIMEOUT"]))
    comm.bcast(np.ones(100, "f4"), root=1)
    in_python()

how, seconds = sys.argv[1], float(sys.argv[2])
limit = Limit(seconds) if seconds else None
if how == "first" and MPI.COMM_WORLD.rank == 1:
    in_python()
comm = make_communicator("naive", limit=limit)
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
    make_communicator("flat", limit=limit)
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
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(ranks, script, how, seconds=SECONDS):
    environment = {"CHAINERMN_TIMEOUT": f"{seconds:g}"}
    job = jobs.run(ranks, script, how, 0, environment=environment, seconds=JOB_SECONDS)
    assert job.returncode is not None, f"the job hung\n{job}"
    assert monitors() == [], job
    return job


def monitors():
    """The command lines of monitors whose ranks have ended, and that don't end though they can.

    Other jobs on this machine have monitors, too, that are just about to end.
    """
    deadline = time.monotonic() + 20
    found = _without_ranks()
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        still = _without_ranks()
        found = {process: words for process, words in found.items() if process in still}
    return list(found.values())


def _without_ranks():
    return {
        process.pid: words
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [])
        and any("chainermn_comm.watchdog.monitor" in word for word in words)
        and not any(psutil.pid_exists(int(word)) for word in words if word.isdigit())
    }


def said(job, *patterns):
    """Those patterns are found in the report, in that order."""
    start = job.err.find("ChainerMN: likely culprit")
    assert start >= 0, job
    for pattern in patterns:
        found = re.compile(pattern, re.M).search(job.err, start)
        assert found, f"{pattern!r} is missing\n{job}"
        start = found.end()


def explained(job):
    """The first thing that `chainermn explain` knows of the job's output."""
    return search(io.BytesIO((job.out + job.err).encode()))[0].known.name


BCAST = r"^  rank 0 .* waits in bcast \(root 1, collective call 5\) for"


@pytest.mark.parametrize(
    ("how", "where", "stack", "known"),
    [
        ("in_python", "is in no call", "in in_python", "stalled-rank-elsewhere"),
        ("in_c", "is in no call", "in in_c", "stalled-rank-elsewhere"),
        ("stopped", "is stopped", None, "stalled-rank-stopped"),
        ("ended", "has ended and waits in MPI_Finalize", None, "stalled-rank-ended"),
        (
            "raising_in_a_thread",
            "is in no call",
            "in raising_in_a_thread",
            "stalled-rank-elsewhere",
        ),
    ],
)
def test_a_rank_that_does_not_come_is_named_first_and_the_job_ends(
    how, where, stack, known, script
):
    job = run(2, script, how)
    assert job.returncode != 0, job
    culprit = rf"culprit: rank 1 \(process \d+ on \S+\) {where}"
    said(job, culprit, BCAST, *([rf"^Stacks of rank 1\b[\s\S]*?{stack}"] if stack else []))
    said(job, culprit, "^Stacks of rank 0", r"script\.py", "ending the job")
    assert job.err.count("likely culprit") == 1, job
    assert "A report follows at 4.0 s" in job.err
    assert "going on" not in job.out
    assert explained(job) == known


def test_a_receive_that_nobody_answers(script):
    job = run(2, script, "in_recv")
    assert job.returncode != 0, job
    said(
        job, r"culprits.*: rank 1 .* waits in recv_obj \(from rank 0, tag 5, ", "or: rank 0", BCAST
    )
    assert explained(job) == "stalled-ranks-wait-for-one-another"


def test_a_rank_in_another_communicators_call(script):
    # Rank 1 waits in the communicator of ranks 0 and 1 for rank 0, which waits for rank 1.
    job = run(3, script, "in_a_part")
    assert job.returncode != 0, job
    said(job, "culprits.*: rank 1 .* waits in allreduce_obj", "or: rank 0 .* waits in bcast")
    assert "rank 2 (process" in job.err


def test_three_ranks(script):
    job = run(3, script, "in_python")
    assert job.returncode != 0, job
    said(job, "culprit: rank 2 ", "^  rank 0 .* waits in bcast", "^  rank 1 .* waits in bcast")
    said(job, r"^Stacks of rank 2\b", "in in_python")


@pytest.mark.parametrize(("how", "operation"), [("finalize", "MPI_Finalize"), ("create", "create")])
def test_waiting_outside_any_communicator(how, operation, script):
    job = run(2, script, how)
    assert job.returncode != 0, job
    said(
        job, "culprit: rank 1 .* is in no call", rf"^  rank 0 .* waits in {operation}", "in_python"
    )


def test_a_rank_that_does_not_come_to_make_the_first_communicator(script):
    job = run(3, script, "first")
    assert job.returncode != 0, job
    said(
        job,
        r"culprit: rank 1 \(process \d+ on \S+\) is in no call",
        "^  rank 0 .* waits in create_communicator",
        "^  rank 2 .* waits in create_communicator",
        "ending the job",
    )
    assert job.err.count("likely culprit") == 1, job
    assert "A report follows at 4.0 s" in job.err


def test_a_killed_rank_ends_the_job_and_is_named_by_the_monitor(script):
    """MPICH's launcher may name another one, which it has killed itself."""
    for _ in range(4):
        job = run(3, script, "killed", 600)
        assert job.returncode != 0, job
        found = re.findall(
            r"^ChainerMN: rank (\d+) \(process \d+ on \S+\) is gone, (.*)", job.err, re.M
        )
        if found:
            break  # else the machine was so busy that the launcher had gone, and nobody heard
    assert found == [
        ("2", "last seen in no call, after allreduce (collective call 4, 80 bytes).")
    ], job
    assert "rank-gone" in [one.known.name for one in search(io.BytesIO(job.err.encode()))]


def test_three_seconds_after_an_abort_the_ranks_are_ended(script):
    job = run(3, script, "aborting_in_vain", 600)
    assert job.returncode != 0, job
    assert "going on" not in job.out


def test_by_default_there_is_a_report_and_the_job_goes_on(script):
    job = jobs.run(2, script, "asleep", 2.0)  # the script imposes what is 600 s by default
    assert job.returncode == 0, job
    said(job, "culprit: rank 1 .* is in no call", "The ranks go on waiting")
    assert job.err.count("likely culprit") == 1, job
    assert job.out.count("going on") == 2, job
    assert monitors() == []


def test_work_that_a_rank_said_to_do_alone_is_waited_for_and_functions_are_named(script):
    job = run(2, script, "alone_then_elsewhere", 2)
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


def test_zero_switches_it_off(script):
    environment = {"CHAINERMN_TIMEOUT": "0"}
    job = jobs.run(2, script, "in_python", 0, environment=environment, seconds=8)
    assert job.returncode is None
    assert "ChainerMN:" not in job.err


@pytest.mark.parametrize("value", ["soon", "-1", "0.5", "nan", "inf", "1e12"])
def test_a_bad_value_is_an_error_on_all_ranks(value, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        jobs.PRELUDE
        + """
from chainermn_comm import create_communicator
try:
    create_communicator("naive")
except ValueError as error:
    print("REFUSED", error)
"""
    )
    job = jobs.run(2, path, environment={"CHAINERMN_TIMEOUT": value})
    assert job.returncode == 0, job
    assert job.out.count("REFUSED CHAINERMN_TIMEOUT must be the seconds") == 2, job
    assert repr(value) in job.out
    assert explained(job) == "bad-timeout"


def test_ranks_that_are_given_different_values_are_told(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        jobs.PRELUDE
        + """
import os
from mpi4py import MPI
from chainermn_comm import RankMismatchError, create_communicator
os.environ["CHAINERMN_TIMEOUT"] = str(10 + MPI.COMM_WORLD.rank)
try:
    create_communicator("naive")
except RankMismatchError as error:
    print("REFUSED", error)
"""
    )
    job = jobs.run(2, path)
    assert job.returncode == 0, job
    for rank in range(2):
        told = f"on rank {rank}: ranks disagree on CHAINERMN_TIMEOUT: 10 s and the end on rank 0; "
        assert told in job.out, job


def test_one_rank_has_no_monitor(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        """
import psutil
from chainermn_comm import create_communicator
with create_communicator("naive") as comm:
    comm.allreduce_obj(1)
    lines = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not any(str(psutil.Process().pid) in (line or ()) for line in lines)
"""
    )
    done = subprocess.run([sys.executable, path], env=jobs.variables(), timeout=60)
    assert done.returncode == 0
