"""BLAS threads of ranks that share cores, in jobs of their own: this one's tests set the number."""

from __future__ import annotations

import json
import os

import pytest

from chainermn_comm.blas_threads import Share, tightest_group, usable_cores
from tests.support import jobs

# NumPy's wheel brings a BLAS, and SciPy's another, which is loaded later.
SCRIPT = (
    jobs.PRELUDE
    + """
import json, os, sys
import numpy, threadpoolctl
from mpi4py import MPI
from chainermn_comm import create_communicator

def threads():
    return [one["num_threads"] for one in threadpoolctl.threadpool_info()
            if one["user_api"] == "blas"]

before = threads()
comm = create_communicator("naive")
first = threads()
comm.finalize()
create_communicator("hierarchical").finalize()
after = threads()
import scipy.linalg
world = MPI.COMM_WORLD
found = world.gather({"before": before, "first": first, "after": after, "late": threads(),
                      "OMP": os.environ.get("OMP_NUM_THREADS")})
if world.rank == 0:
    print("FOUND", json.dumps(found))
"""
)
CORES = usable_cores([Share(frozenset(os.sched_getaffinity(0)), tightest_group(), 0, False)])
UNSET = {f"{name}_NUM_THREADS": "" for name in ("OMP", "OPENBLAS", "GOTO", "MKL", "BLIS")}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def found(job: jobs.Job) -> list[dict]:
    assert job.returncode == 0, job
    line = next(line for line in job.out.splitlines() if line.startswith("FOUND"))
    return json.loads(line.removeprefix("FOUND "))


def test_threads_are_limited_once_and_stay_so(script):
    ranks = CORES + 1  # so that one thread is each one's share, whatever this machine has
    job = jobs.run(ranks, script, environment=UNSET)
    for rank in found(job):
        assert rank["before"], "NumPy has no BLAS that threadpoolctl knows"
        assert rank["first"] == rank["after"] == [1] * len(rank["before"])
        # A library loaded later is limited too.
        assert len(rank["late"]) > len(rank["after"])
        assert set(rank["late"]) == {1}
        assert not rank["OMP"]  # rules more than BLAS
    limited = len(os.sched_getaffinity(0)) > 1  # on one core there is nothing to limit
    assert job.err.count("ChainerMN: limited BLAS threads to") == limited, job
    if limited:
        assert f"to 1 for each of {ranks} ranks on {CORES} cores" in job.err
        assert "set OMP_NUM_THREADS" in job.err


def test_one_rank_keeps_all_cores(script):
    job = jobs.run(1, script, environment=UNSET)
    (rank,) = found(job)
    assert rank["after"] == rank["before"]
    assert max(rank["before"]) > 1 or len(os.sched_getaffinity(0)) == 1
    assert "BLAS" not in job.err


@pytest.mark.parametrize("name", ["OMP", "OPENBLAS"])
def test_what_the_user_set_stays(script, name):
    job = jobs.run(2, script, environment={**UNSET, f"{name}_NUM_THREADS": "2"})
    for rank in found(job):
        assert rank["after"] == rank["before"]
        assert set(rank["late"]) == set(rank["before"])
    assert "BLAS" not in job.err
