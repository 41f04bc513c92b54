"""A call that waits too long is reported, with the rank that keeps it waiting first.

Ranks that are killed, or hold Python's lock, are in tests/chaos.
"""

from __future__ import annotations

import re

import pytest

from tests.support.jobs import runner
from tests.support.jobs.processes import soon
from tests.support.tools.jobs import verdict_on
from tests.support.watchdog import events
from tests.support.watchdog.records import monitors_of

# Long enough for the ranks to be where they shall be, on a machine that is busy.
SECONDS = 5.0
# Imports take their time, so all are made before the ranks meet.
SCRIPT = """
import os, signal, sys, time
import numpy as np
from chainermn_comm import create_communicator
from mpi4py import MPI
from tests.support.watchdog.records import communicator_within

how, report_at, file = sys.argv[1:]
print("RANK", os.getpid(), flush=True)
MPI.COMM_WORLD.Barrier()

def in_python():
    while True:
        pass

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def ended():
    sys.exit()

def asleep():
    while not os.path.exists(file):
        time.sleep(0.01)

world = MPI.COMM_WORLD
if how == "first" and world.rank == 1:
    in_python()
if report_at == "by default":
    comm = create_communicator("naive")
else:
    comm = communicator_within("naive", float(report_at))
for i in range(3):
    comm.allreduce(np.ones(10))
world.Barrier()
if how == "finalize":
    comm.finalize()
if how == "finalize" and world.rank == 1:
    in_python()
if how == "finalize":
    sys.exit()
if world.rank == world.size - 1:
    print("elsewhere", world.rank, flush=True)
    globals()[how]()
comm.bcast(np.ones(100, "f4"), root=1)
print("going on", flush=True)
"""


def run(ranks, how, script=SCRIPT):
    """The job, which the watchdog ends."""
    environment = {"CHAINERMN_TIMEOUT": f"{SECONDS:g}", **events.ENVIRONMENT}
    job = runner.run_text(ranks, script, how, "by default", "", environment=environment)
    assert job.returncode not in (0, None), job
    left_nothing(job)
    return job


def left_nothing(job):
    """No monitor of the job stays."""
    pids = set(re.findall(r"RANK (\d+)", job.out))
    assert pids, job
    assert soon(lambda: not monitors_of(pids)), job


def said(job, *patterns):
    """Those patterns are found in the report, in that order."""
    start = job.err.find("ChainerMN: likely culprit")
    assert start >= 0, job
    for pattern in patterns:
        found = re.compile(pattern, re.M).search(job.err, start)
        assert found, f"{pattern!r} is missing\n{job}"
        start = found.end()


def in_full(*case):
    return pytest.param(*case, marks=pytest.mark.full)


def in_ci(*case):
    return pytest.param(*case, marks=pytest.mark.ci)


BCAST = r"^  rank 0 .* waits in bcast \(root 1, collective call 4\) for"
# How many ranks, what the last one does, what it does by the report, and what follows
# there in this order.
CASES = [
    (
        3,
        "in_python",
        "is in no call",
        [
            BCAST,
            "^  rank 1 .* waits in bcast",
            r"^Stacks of rank 2\b[\s\S]*?in in_python",
            r"^Stacks of ranks? 0[\s\S]*script\.py",
        ],
    ),
    (2, "stopped", "is stopped", [BCAST, r"^Stacks[\s\S]*script\.py"]),
    (2, "ended", "has ended and waits in MPI_Finalize", [BCAST, "^Stacks"]),
    in_ci(
        2,
        "finalize",
        "is in no call",
        ["^  rank 0 .* waits in MPI_Finalize", "in in_python"],
    ),
    in_ci(
        3,
        "first",
        r"has not come to create_communicator on \S+, unless on",
        [
            "^  rank 0 .* waits in create_communicator",
            "^  rank 2 .* waits in create_communicator",
        ],
    ),
]


def name_of(value):
    if isinstance(value, str):
        return value
    return ""


@pytest.mark.parametrize(
    ("ranks", "how", "doing", "words"),
    CASES,
    ids=name_of,
)
def test_a_rank_that_does_not_come_is_named_first_and_the_job_ends(
    ranks, how, doing, words
):
    job = run(ranks, how)
    if how == "first":
        culprit = 1
    else:
        culprit = ranks - 1
    named = rf"likely culprits?\b.*: rank {culprit} (\(process \d+ on \S+\) )?{doing}"
    said(job, named, *words, "ending the job")
    assert job.err.count("ChainerMN: likely culprit") == 1, job
    assert f"A report follows at {SECONDS} s" in job.err
    assert "going on" not in job.out
    event = events.the_only("watchdog_abort", job.err)
    assert event["rank"] == 0
    assert re.match(named, event["reason"]), event
    assert re.search(doing, event["how"])
    verdict = verdict_on(job)
    assert verdict.rank == culprit
    assert re.match(doing, verdict.how)


OVERLAP = """
import os
import chainer, numpy as np
from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.support.worlds.planted import stop_while_a_thread_shares_memory

print("RANK", os.getpid(), flush=True)
comm = create_communicator()
if comm.rank == 1:
    stop_while_a_thread_shares_memory()
model = chainer.links.Linear(10, 10)
optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm, overlap=True).setup(model)
for _ in range(9):
    optimizer.update(lambda: chainer.functions.sum(model(np.ones((2, 10), "f"))))
"""


@pytest.mark.ci
def test_a_thread_that_waits_where_it_prepares_its_sums_is_seen():
    """Nothing had been called on its communicator before."""
    said(
        run(2, "", OVERLAP),
        "culprit: rank 1 .* is stopped",
        "^  rank 0 .* waits in preparing sums",
    )


@pytest.mark.ci
def test_by_default_there_is_a_report_and_the_job_goes_on(tmp_path):
    file = tmp_path / "reported"

    def look(_, so_far):
        if "go on waiting" in so_far()[1]:
            file.touch()

    # The script imposes what is 600 s by default.
    job = runner.run_text(2, SCRIPT, "asleep", SECONDS, file, meanwhile=look)
    assert job.returncode == 0, job
    left_nothing(job)
    said(job, "culprit: rank 1 .* is in no call", "The ranks go on waiting")
    assert job.err.count("ChainerMN: likely culprit") == 1, job
    assert job.out.count("going on") == 2, job


EXIT_FUNCTIONS = """
import atexit, os, time
from mpi4py import MPI
import chainermn_comm
print("RANK", os.getpid(), flush=True)
MPI.COMM_WORLD.Barrier()
atexit.register(time.sleep, 2 * float(os.environ["CHAINERMN_TIMEOUT"]))
chainermn_comm.create_communicator("naive").allreduce_obj(1)
"""


@pytest.mark.ci
def test_an_exit_function_that_takes_long_is_no_wait_in_finalize():
    """Though it was registered before the first communicator was made."""
    environment = {"CHAINERMN_TIMEOUT": f"{SECONDS:g}"}
    job = runner.run_text(2, EXIT_FUNCTIONS, environment=environment)
    assert job.returncode == 0, job
    assert "ChainerMN" not in job.err, job
    left_nothing(job)


MODEL_PARALLEL = """
import os, sys
import chainer.functions as F
import chainermn
import numpy as np
from chainer import Variable
from chainermn.functions import bcast, recv, send
from mpi4py import MPI

print("RANK", os.getpid(), flush=True)
MPI.COMM_WORLD.Barrier()

def other_orders(first):
    calls = [lambda: recv(comm, 1, tag=7) if first else send(x, comm, 0, tag=7),
             lambda: bcast(comm, x)]
    for call in calls if first else reversed(calls):
        call()

def backward_never_comes(first):
    global kept
    if first:
        send(x, comm, 1, tag=7).backward()
    else:
        kept = recv(comm, 0, tag=7)
        w = Variable(kept.array)
        F.sum(w * kept.array).backward()

def both_send_first(first):
    send(x, comm, 1 - comm.rank, tag=7)
    recv(comm, 1 - comm.rank, tag=7)

def delegate_dropped(first):
    if first:
        send(x, comm, 1, tag=7)
    else:
        F.sum(recv(comm, 0, tag=7)).backward()

comm = chainermn.create_communicator("naive")
x = Variable(np.ones(1 << 20, "f"))  # too large for MPI to take it before it is received
globals()[sys.argv[1]](comm.rank == 0)
comm.bcast_obj("met again")
"""
# What the report says of the ranks that wait in these functions.
WAITS = {
    "other_orders": [
        r"rank 0 .* waits in recv \(from rank 1, tag 7\), inside chainermn.functions: recv",
        r"rank 1 .* waits in chainermn.functions: bcast \(root 0, collective call 1",
    ],
    "backward_never_comes": [
        r"rank 0 .* waits in recv \(from rank 1, .* backward of send\(rank=1, tag=7\)"
    ],
    "both_send_first": [
        r"rank 0 .* waits in send \(to rank 1, tag 7, .* bytes\), inside chainermn.functions: send",
        r"rank 1 .* waits in send \(to rank 0, tag 7, .*functions: send",
    ],
    "delegate_dropped": [
        r"rank 1 .* waits in send \(to rank 0, .* backward of recv\(rank=0, tag=7\)",
        # This is told at once, and by whom.
        r"rank 0: the delegate variable that send\(rank=1, tag=7\) returned was",
    ],
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "how", [how if how == "backward_never_comes" else in_full(how) for how in WAITS]
)
def test_model_parallelism_that_waits_without_end_is_reported_and_ends(how):
    job = run(2, how, MODEL_PARALLEL)
    for words in WAITS[how]:
        assert re.search(words, job.err), job


BAD_VALUES = ["soon", "-1", "0.5", "nan", "inf", "1e12"]
REFUSED = f"""
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


def test_bad_values_and_values_that_differ_are_errors_on_all_ranks():
    job = runner.run_text(2, REFUSED)
    assert job.returncode == 0, job
    refused = re.findall("^REFUSED CHAINERMN_TIMEOUT.*", job.out, re.M)
    for value in BAD_VALUES:
        found = sum(f"TIMEOUT is {value!r};" in line for line in refused)
        assert found == 2, job
    for rank in range(2):
        told = f"on rank {rank}: ranks disagree on CHAINERMN_TIMEOUT: 10 s and the end on rank 0; "
        assert told in job.out, job


UNWATCHED = """
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


@pytest.mark.ci
def test_one_rank_costs_neither_a_monitor_nor_a_thread():
    job = runner.run_text(1, UNWATCHED)
    assert job.returncode == 0, job
