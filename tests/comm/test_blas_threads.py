"""How the cores of a node are counted and shared among its ranks' BLAS threads, in jobs too."""

from __future__ import annotations

import json
import os

import pytest

from _chainermn_limits import tightest_cgroup
from chainermn_comm.runtime.blas_threads import (
    RankResources,
    allowed_threads,
    usable_cores,
)
from tests.support.jobs import runner


def share(cores, threads=1, group=None, chosen=False):
    return RankResources(frozenset(cores), group, threads, chosen)


@pytest.mark.parametrize(
    ("cores", "shares"),
    [
        (9, [share(range(8)), share({7, 8})]),
        (2, [share(range(16), group=("/job", 2.5))] * 4),
        (
            5,
            [
                share(range(16), group=("/job", 2.5)),
                share(range(16), group=("/other", 3.0)),
            ],
        ),
        # One without a limit.
        (16, [share(range(16), group=("/job", 2.5)), share(range(16))]),
        (1, [share(range(16), group=("/job", 0.5))] * 2),
    ],
)
def test_cores_are_the_union_of_the_ranks_cores_and_a_quota_holds_for_its_cgroup(
    cores, shares
):
    assert usable_cores(shares) == cores


@pytest.mark.parametrize(
    ("allowed", "shares"),
    [
        (2, [share(range(8), 8)] * 3),
        (1, [share(range(2), 2)] * 4),  # more ranks than cores
        (None, [share(range(2), 1)] * 4),  # nothing left to limit
        (None, [share(range(8), 4)] * 2),  # fits
        (None, [share(range(8), 8)]),  # alone
        (None, [share({0, 1}, 2), share({2, 3}, 2)]),  # bound to cores of their own
        # A rank's user set a number.
        (None, [share({0, 1}, 2), share({0, 1}, 0, chosen=True)]),
    ],
)
def test_threads_are_shared_out(allowed, shares):
    assert allowed_threads(shares) == allowed


def test_version_1_of_cgroups_writes_minus_1_for_no_limit(tmp_path):
    """Limits are read in tests/tools/test_threads.py."""
    folder = tmp_path / "cpu" / "docker"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert tightest_cgroup("4:cpu,cpuacct:/docker\n", tmp_path) is None


# NumPy's wheel brings a BLAS, and SciPy's another, which is loaded later.
SCRIPT = """
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
CORES = usable_cores(
    [RankResources(frozenset(os.sched_getaffinity(0)), tightest_cgroup(), 0, False)]
)
UNSET = {
    f"{name}_NUM_THREADS": "" for name in ("OMP", "OPENBLAS", "GOTO", "MKL", "BLIS")
}


def threads_in_job(ranks, **environment):
    """What each rank reports of its threads, and what the job says on standard error."""
    job = runner.run_text(ranks, SCRIPT, environment=UNSET | environment)
    assert job.returncode == 0, job
    line = next(line for line in job.out.splitlines() if line.startswith("FOUND"))
    return json.loads(line.removeprefix("FOUND ")), job.err


def test_threads_are_limited_once_and_stay_so():
    # So that one thread is each one's share, whatever this machine has.
    ranks = CORES + 1
    found, said = threads_in_job(ranks)
    for rank in found:
        assert rank["before"], "NumPy has no BLAS that threadpoolctl knows"
        ones = [1] * len(rank["before"])
        assert rank["first"] == rank["after"] == ones
        # A library loaded later is limited too.
        assert len(rank["late"]) > len(rank["after"])
        assert set(rank["late"]) == {1}
        assert not rank["OMP"]  # rules more than BLAS
    limited = len(os.sched_getaffinity(0)) > 1  # on one core there is nothing to limit
    told = f"ChainerMN: limited BLAS threads to 1 for each of {ranks} ranks on {CORES} cores"
    assert said.count("ChainerMN: limited") == limited, said
    assert said.count(told) == limited, said
    assert ("set OMP_NUM_THREADS" in said) == limited


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [(1, ()), (2, ("OMP",)), pytest.param(2, ("OPENBLAS",), marks=pytest.mark.full)],
)
def test_one_rank_keeps_all_cores_and_what_the_user_set_stays(ranks, chosen):
    found, said = threads_in_job(
        ranks, **{f"{name}_NUM_THREADS": "2" for name in chosen}
    )
    for rank in found:
        assert rank["after"] == rank["before"]
        assert set(rank["late"]) == set(rank["before"])
        assert max(rank["before"]) > 1 or len(os.sched_getaffinity(0)) == 1
    assert "BLAS" not in said
