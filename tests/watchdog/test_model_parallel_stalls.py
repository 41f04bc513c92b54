"""Model parallelism that waits for what never comes ends, and says which rank waits for whom."""

from __future__ import annotations

import re

import pytest

from tests.support import jobs

# Short, and long enough for the ranks to be where they shall be, on a machine that is busy.
SECONDS = 3.0
JOB_SECONDS = 120.0  # ends a hang, no more

SCRIPT = (
    jobs.PRELUDE
    + """
import sys
import chainer.functions as F
import chainermn
import numpy as np
from chainer import Variable
from chainermn.functions import bcast, recv, send
from mpi4py import MPI

def nobody_sends(first):
    if not first:
        recv(comm, 0, tag=7)

def nobody_receives(first):
    if first:
        send(x, comm, 1, tag=7)

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

MPI.COMM_WORLD.Barrier()  # not watched: imports take their time
comm = chainermn.create_communicator("naive")
x = Variable(np.ones(1 << 20, "f"))  # too large for MPI to take it before it is received
globals()[sys.argv[1]](comm.rank == 0)
comm.bcast_obj("met again")
"""
)

# What the report says of the ranks that wait in these functions.
WAITS = {
    "nobody_sends": [
        r"rank 1 .* waits in recv \(from rank 0, tag 7\), inside chainermn.functions: recv"
    ],
    "nobody_receives": [
        r"rank 0 .* waits in send \(to rank 1, tag 7, .* bytes\), inside chainermn.functions: send"
    ],
    "other_orders": [
        r"rank 0 .* waits in recv \(from rank 1, tag 7\), inside chainermn.functions: recv",
        r"rank 1 .* waits in chainermn.functions: bcast \(collective call 1",
    ],
    "backward_never_comes": [
        r"rank 0 .* waits in recv \(from rank 1, .* backward of send\(rank=1, tag=7\)"
    ],
    "both_send_first": [
        r"rank 0 .* waits in send \(to rank 1, tag 7, .*functions: send",
        r"rank 1 .* waits in send \(to rank 0, tag 7, .*functions: send",
    ],
    "delegate_dropped": [
        r"rank 1 .* waits in send \(to rank 0, .* backward of recv\(rank=0, tag=7\)"
    ],
}
DEFAULT = ("other_orders", "backward_never_comes")


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=() if how in DEFAULT else pytest.mark.full) for how in WAITS],
)
def test_a_wait_without_end_is_reported_and_ends_the_job(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {"CHAINERMN_TIMEOUT": f"{SECONDS:g}"}
    job = jobs.run(2, script, how, environment=environment, seconds=JOB_SECONDS)
    assert job.returncode not in (0, None), job
    for words in WAITS[how]:
        assert re.search(words, job.err), job
    if how == "delegate_dropped":  # which is told at once, and by whom
        assert "rank 0: the delegate variable that send(rank=1, tag=7) returned was" in job.err
