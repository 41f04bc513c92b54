"""A traced job and `chainermn trace`: clocks that differ, a late rank, a rank that is killed."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.jobs.runner import run_command, run_text, variables

# Each rank's clock is far from the others', and goes faster than rank 0's; by their own
# words ranks are on different machines. Rank 1 is late each time.
SKEWED = """
import time
from mpi4py import MPI
from tests.comm.tracing import on_machine
rank = MPI.COMM_WORLD.rank
true = time.perf_counter
zero = MPI.COMM_WORLD.bcast(true())
on_machine(rank, lambda: zero + (true() - zero) * (1 + 0.5 * rank) + 5000.0 * rank)

import numpy as np
from chainermn_comm import create_communicator

comm = create_communicator("naive")
for turn in range(12):
    if rank == 1:
        time.sleep(0.3)
    comm.allreduce(np.ones(1000, "f4"))
if rank == 0:
    comm.send(np.ones(10), 1, 3)
elif rank == 1:
    comm.recv(0, 3)
comm.finalize()
"""


def traced(folder, ranks, text):
    return run_text(ranks, text, environment={"CHAINERMN_TRACE": str(folder)})


def trace(*arguments):
    """What `chainermn trace` says."""
    command = [sys.executable, "-m", "chainermn_tools", "trace", *map(str, arguments)]
    done = run_command(command, variables(), 200)
    assert done.returncode == 0, done
    return done.out


@pytest.mark.ci
def test_ranks_with_other_clocks_are_aligned_and_the_late_one_is_named(tmp_path):
    job = traced(tmp_path / "t", 3, SKEWED)
    assert job.returncode == 0, job
    merged = tmp_path / "merged.json"
    said = trace(tmp_path / "t", "--output", merged)
    assert "Others wait most for rank 1" in said
    assert "clocks agree to within" in said
    late = 0
    for event in json.loads(merged.read_text()):
        if event["name"] == "allreduce" and event["ph"] == "X":
            late += event["args"].get("waited_for") == 1
    assert late > 12  # of 24 in all: most


KILLED = """
import os, signal, time
import numpy as np
from chainermn_comm import create_communicator
comm = create_communicator("hierarchical")
for turn in range(10_000):
    comm.allreduce(np.ones(100))
    time.sleep(0.01)
    if turn == 60 and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_job_leaves_a_trace_that_can_be_read(tmp_path):
    job = traced(tmp_path, 2, KILLED)
    assert job.returncode, job
    for path in tmp_path.iterdir():
        whole, _, _ = path.read_text().rpartition(",\n")
        names = [event["name"] for event in json.loads(whole + "]")]
        assert names.count("allreduce") >= 60  # all calls that have ended
    assert "allreduce" in trace(tmp_path)
