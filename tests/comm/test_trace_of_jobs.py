"""A traced job and `chainermn trace`: clocks that differ, a late rank, a rank that is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.jobs.runner import Job, run_command, run_text, variables

# Each rank's clock is far from the others', and goes faster than rank 0's; by their own
# words ranks are on different machines. Rank 1 is late each time.
SKEWED = """
import json, sys, time
from mpi4py import MPI
from tests.support.tools.tracing import on_machine
rank = MPI.COMM_WORLD.rank
true = time.perf_counter
zero = MPI.COMM_WORLD.bcast(true())
on_machine(rank, lambda: zero + (true() - zero) * (1 + 0.5 * rank) + 5000.0 * rank)

import numpy as np
from chainermn_comm import create_communicator

comm = create_communicator("naive")
moments = []
for turn in range(40):
    if rank == 1:
        time.sleep(0.02)
    moments.append(true() - zero)
    comm.allreduce(np.ones(1000, "f4"))
if rank == 0:
    comm.send(np.ones(10), 1, 3)
elif rank == 1:
    comm.recv(0, 3)
comm.finalize()
everyone = MPI.COMM_WORLD.gather(moments)
if rank == 0:
    print(json.dumps(everyone))
"""


def traced(folder: Path, ranks: int, text: str, *arguments: str) -> Job:
    return run_text(
        ranks, text, *arguments, environment={"CHAINERMN_TRACE": str(folder)}
    )


def trace(*arguments: object) -> str:
    """What `chainermn trace` says."""
    command = [sys.executable, "-m", "chainermn_tools", "trace", *map(str, arguments)]
    done = run_command(command, variables(), 200)
    assert done.returncode == 0, done
    return done.out


@pytest.mark.ci
def test_ranks_with_other_clocks_are_aligned_and_the_late_one_is_named(tmp_path):
    job = traced(tmp_path / "t", 3, SKEWED)
    assert job.returncode == 0, job
    moments = json.loads(job.out)
    said = trace(tmp_path / "t", "--output", tmp_path / "merged.json")
    assert "Others wait most for rank 1" in said
    assert "clocks agree to within" in said
    calls = [
        e for e in json.loads((tmp_path / "merged.json").read_text()) if e["ph"] == "X"
    ]
    starts = {
        rank: [
            c["ts"] / 1e6 for c in calls if (c["pid"], c["name"]) == (rank, "allreduce")
        ]
        for rank in range(3)
    }
    # A rank may be stopped for a while between its own look at the clock and the
    # trace's, so not all moments fit. Drift alone, if it stayed, would come to a quarter
    # of the time, halfway.
    base = sorted(s - m for s, m in zip(starts[0], moments[0], strict=True))[20]
    for rank in range(3):
        errors = sorted(
            abs(s - m - base) for s, m in zip(starts[rank], moments[rank], strict=True)
        )
        assert errors[20] < 0.05 * (moments[0][-1] - moments[0][0]), (rank, errors)
    last = [
        c
        for c in calls
        if c["name"] == "allreduce" and c["args"].get("waited_for") == 1
    ]
    assert len(last) > 40  # of 80: most


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


TRAINING = """
import sys
import chainer, numpy as np
from chainer import functions as F, links as L
import chainermn
from chainermn import functions as MF

comm = chainermn.create_communicator("hierarchical")
model = L.Classifier(L.Linear(8, 3))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), comm, double_buffering="double" in sys.argv)
optimizer.setup(model)
x, t = np.ones((4, 8), "f4"), np.zeros(4, "i4")
for _ in range(3):
    optimizer.update(model, x, t)
y = MF.allgather(comm, chainer.Variable(x))
F.sum(y[0]).backward()
if comm.rank == 0:
    MF.send(chainer.Variable(x), comm, 1).backward()
else:
    h = MF.recv(comm, 0, pseudo := chainer.Variable(x))
    F.sum(h).backward()
comm.finalize()
"""


@pytest.mark.ci
@pytest.mark.parametrize("double", [pytest.param(False, marks=pytest.mark.full), True])
def test_training_and_differentiable_communication_are_traced(tmp_path, double):
    job = traced(tmp_path, 2, TRAINING, *["double"] if double else [])
    assert job.returncode == 0, job
    for rank in range(2):
        (path,) = tmp_path.glob(f"*.rank{rank}.json")
        calls = [e for e in json.loads(path.read_text()[:-2] + "]") if e["ph"] == "X"]
        gradients = [c for c in calls if c["name"] == "allreduce_grad"]
        assert [call["args"]["bytes"] for call in gradients] == [4 * (8 * 3 + 3)] * len(
            gradients
        )
        assert len(gradients) >= 2
        assert any(call["tid"] for call in gradients) == double
        names = {call["name"] for call in calls}
        assert {"bcast_data", "finalize"} <= names
        assert names & {"allgather", "alltoall"}
        assert {"send", "recv"} <= names or {"send_obj", "recv_obj"} <= names
