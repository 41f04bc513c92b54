"""An exception in the middle of a collective call, of which the other ranks can't know."""

from __future__ import annotations

import pytest

from tests.support.jobs.runner import run_text

# The functions that call MPI.
HANDSHAKE = "handshake"
DATA = "wait_all bcast_buffer exchange"
# Where a call agrees a second time, that all ranks could unpickle what came.
UNPICKLING = "unpickling"
REFUSED = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "0"}
# What rank 0 does after an interruption: no later call waits for rank 1.
CHECK = """
import re, sys
from pathlib import Path
import numpy as np
from mpi4py import MPI
from chainermn_comm import CommunicationError, create_communicator
from tests.support.worlds.models import with_grads

def check(comm, what, reason):
    array = np.ones(3)
    send = lambda data: comm.send(data, 1)
    for call in (comm.allreduce, comm.allreduce_grad, comm.bcast_obj, send):
        try:
            call(array)
        except CommunicationError as error:
            words = rf"rank 0: {what} was interrupted .*\\(InterruptedError: {reason}"
            assert re.search(words, str(error)), error
        else:
            sys.exit("it was called")
    comm.finalize()
    Path(sys.argv[1]).touch()  # what is printed before an abort may be lost
    MPI.COMM_WORLD.Abort(0)
"""

# Rank 0's timer interrupts a call in a handshake or while its data move; rank 1 stays
# in that call or the next.
SCRIPT = (
    CHECK
    + """
import signal, time
from tests.support.worlds.planted import delay_second_handshakes

def interrupt(_, frame):
    place = frame.f_code.co_name
    if place == "_allgather":
        operation = frame.f_back.f_locals["operation"]
        place = "unpickling" if operation.endswith(", unpickling") else "handshake"
    if place in where.split():
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise InterruptedError("by a timer")

_, name, where = sys.argv[1:]
comm = create_communicator("naive")
array = np.ones(16 << 20, "f4")
model = with_grads(v=array, w=array)
data = {"bcast_data": model, "alltoall": [array] * comm.size}.get(name, array)
rank = MPI.COMM_WORLD.rank
if rank and where == "unpickling":
    delay_second_handshakes(0.02)
if rank == 0:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
try:
    while True:
        if where == "handshake" and rank:
            time.sleep(0.02)
        getattr(comm, name)(data)
except InterruptedError:
    assert rank == 0
check(comm, name, "by a timer")
"""
)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("allreduce", HANDSHAKE),
        ("bcast", HANDSHAKE),
        ("multi_node_mean", DATA),
        ("alltoall", DATA),
        ("bcast_data", DATA),
        ("allgather_obj", UNPICKLING),
    ],
)
def test_after_a_call_was_interrupted_every_call_says_so(name, where, tmp_path):
    path = tmp_path / "told"
    job = run_text(2, SCRIPT, path, name, where, environment=REFUSED)
    assert path.exists(), job
    assert job.returncode is not None, job


@pytest.mark.parametrize(("ranks", "name"), [(2, "allreduce"), (2, "bcast")])
def test_a_call_that_is_interrupted_ends_the_job(ranks, name, tmp_path):
    path = tmp_path / "told"
    job = run_text(ranks, SCRIPT, path, name, DATA)
    assert job.returncode == 1, job
    assert f"rank 0 of {ranks}: uncaught InterruptedError" in job.err, job
    assert not path.exists(), job


def test_an_algorithm_whose_memory_was_being_made_leaves_a_communicator_that_says_so(
    tmp_path,
):
    script = (
        CHECK
        + """
from tests.support.worlds.planted import fail_while_memory_is_shared

comm = create_communicator("hierarchical")
if comm.rank == 0:
    fail_while_memory_is_shared(InterruptedError("planted"))
try:
    comm.allreduce_grad(with_grads(w=np.ones(3, "f4")))
except InterruptedError:
    check(comm, "a mean of gradients", "planted")
"""
    )
    path = tmp_path / "told"
    job = run_text(2, script, path, environment=REFUSED)
    assert path.exists(), job
