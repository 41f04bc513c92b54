"""A CUDA or NCCL error on one rank that can't be raised on all ends the job, with its words."""

from __future__ import annotations

import re

import pytest

from tests.support.jobs.runner import run_text

pytestmark = pytest.mark.ci

RANKS, FAILING = 2, 1
SCRIPT = """
import sys, time
from contextlib import nullcontext
import numpy as np
from mpi4py import MPI
from tests.support.doubles import gpus
from tests.support.doubles.cupy_double import installed
from tests.support.doubles.device_double import ILLEGAL_ADDRESS, OUT_OF_MEMORY
from tests.support.worlds.models import Model, Param
from tests.support.doubles.nccl_double import NcclError
from tests.support.worlds.topologies import on_nodes

name, where, nodes, how = sys.argv[1:]
context = installed()
with context if how != "leave" else nullcontext(context.__enter__()) as double:
    comm = on_nodes(map(int, nodes), name)
    grads = [gpus.put(np.full(size, comm.rank, "f4")) for size in (3, 2000)]
    model = Model(**{f"p{i}": Param(grad, grad) for i, grad in enumerate(grads)})
    def call():
        if how == "verb":
            comm.bcast(comm.allreduce(grads[1]))
        else:
            comm.allreduce_grad(model)
    for _ in range(2):
        call()
        gpus.to_host(grads[0])
    MPI.COMM_WORLD.Barrier()
    print("BEGIN", flush=True)
    if comm.rank == 1:
        is_nccl = where[:3] in ("get", "all", "bro")
        error = NcclError("NCCL_ERROR_SYSTEM_ERROR: planted") if is_nccl else OUT_OF_MEMORY
        double.plant(where, ILLEGAL_ADDRESS if where == "work" else error)
    call()
    if how == "finalize":
        comm.finalize()
    elif how == "leave":
        sys.exit()
    while True:  # long beside what the thread takes to see it, also on a busy machine
        time.sleep(0.5)
        gpus.to_host(grads[0])
"""
# Where MPI takes the sums, a call waits for its end; elsewhere a thread sees what fails
# after it.
CASES = [
    ("flat", "memcpyAsync to device", "00", "go on"),
    ("flat", "eventQuery", "00", "go on"),
    ("flat", "memcpyAsync to host", "00", "go on"),
    ("flat", "work", "01", "go on"),
    ("pure_nccl", "launchKernel", "00", "go on"),
    ("pure_nccl", "allReduce", "00", "go on"),
    ("pure_nccl", "work", "00", "go on"),
    ("pure_nccl", "getAsyncError", "00", "go on"),
    ("pure_nccl", "getAsyncError", "00", "finalize"),
    ("pure_nccl", "work", "00", "leave"),
    ("hierarchical", "getAsyncError", "01", "go on"),
    *[
        ("hierarchical", where, "01", "verb")
        for where in ("allReduce", "broadcast", "work")
    ],
    ("pure_nccl", "getAsyncError", "00", "verb"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_an_error_on_one_rank_ends_the_job_with_its_words(case):
    job = run_text(RANKS, SCRIPT, *case, seconds=60.0)
    assert job.out.count("BEGIN") == RANKS, job
    assert job.returncode == 1, job
    assert re.search(
        rf"rank {FAILING} of {RANKS}: uncaught CommunicationError", job.err
    ), job
    doing = (
        "NCCL, moving arrays between"
        if case[-1] == "verb"
        else "averaging gradients on"
    )
    told = rf"rank {FAILING}: {doing} GPUs failed: .*(cudaError|NCCL_ERROR)"
    assert re.search(told, job.err), job
