"""How the cores of a node are counted and shared among its ranks' BLAS threads, in jobs too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from chainermn_comm.blas_threads import Share, allowed_threads, tightest_group, usable_cores
from tests.support import jobs


def share(cores, threads=1, group=None, chosen=False) -> Share:
    return Share(frozenset(cores), group, threads, chosen)


def fake(root: Path, folder: str, **files: str) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / folder / name.replace("_", ".", 1)).write_text(text + "\n")


def test_cores_are_the_union_of_what_the_ranks_may_run_on():
    assert usable_cores([share({0, 1}), share({0, 1})]) == 2
    assert usable_cores([share({0, 1}), share({4, 5})]) == 4
    assert usable_cores([share(range(8)), share({7, 8})]) == 9


def test_a_quota_holds_for_all_ranks_of_its_cgroup():
    one = ("/job", 2.5)
    assert usable_cores([share(range(16), group=one)] * 4) == 2
    other = ("/other", 3.0)
    assert usable_cores([share(range(16), group=one), share(range(16), group=other)]) == 5
    # A rank without a limit can use all cores.
    assert usable_cores([share(range(16), group=one), share(range(16))]) == 16
    assert usable_cores([share(range(16), group=("/job", 0.5))] * 2) == 1


@pytest.mark.parametrize(
    ("cores", "threads", "ranks", "allowed"),
    [
        (2, 2, 2, 1),
        (8, 8, 2, 4),
        (8, 8, 3, 2),
        (2, 2, 4, 1),  # more ranks than cores
        (2, 1, 4, None),  # nothing left to limit
        (8, 4, 2, None),  # fits
        (8, 8, 1, None),  # alone
    ],
)
def test_threads_are_shared_out(cores, threads, ranks, allowed):
    assert allowed_threads([share(range(cores), threads)] * ranks) == allowed


def test_ranks_bound_to_cores_of_their_own_are_left_alone():
    assert allowed_threads([share({0, 1}, 2), share({2, 3}, 2)]) is None
    assert allowed_threads([share({0}, 1), share({1, 2, 3}, 3)]) is None


def test_a_number_that_any_rank_s_user_set_is_left_alone():
    assert allowed_threads([share({0, 1}, 2), share({0, 1}, 0, chosen=True)]) is None


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("400000 100000", 4.0)]
)
def test_cgroup_version_2(tmp_path, text, cores):
    fake(tmp_path, "user/job", cpu_max=text)
    expected = None if cores is None else (str(tmp_path / "user/job"), cores)
    assert tightest_group("0::/user/job\n", tmp_path) == expected


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path):
    fake(tmp_path, "user", cpu_max="300000 100000")
    fake(tmp_path, "user/job", cpu_max="max 100000")
    fake(tmp_path, "user/job/task", cpu_max="800000 100000")
    assert tightest_group("0::/user/job/task\n", tmp_path) == (str(tmp_path / "user"), 3.0)


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("250000", 2.5)])
@pytest.mark.parametrize("mounted_at", ["cpu", "cpu,cpuacct"])
def test_cgroup_version_1(tmp_path, mounted_at, quota, cores):
    folder = tmp_path / mounted_at / "docker" / "abc"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    membership = "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n"
    found = tightest_group(membership, tmp_path)
    assert found == (None if cores is None else (str(folder), cores))


def test_no_cgroups_no_limit(tmp_path):
    assert tightest_group("", tmp_path) is None
    assert tightest_group("0::/not/there\n", tmp_path) is None


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
def job_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def reported(job: jobs.Job) -> list[dict]:
    assert job.returncode == 0, job
    line = next(line for line in job.out.splitlines() if line.startswith("FOUND"))
    return json.loads(line.removeprefix("FOUND "))


def test_threads_are_limited_once_and_stay_so(job_script):
    ranks = CORES + 1  # so that one thread is each one's share, whatever this machine has
    job = jobs.run(ranks, job_script, environment=UNSET)
    for rank in reported(job):
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


def test_one_rank_keeps_all_cores(job_script):
    job = jobs.run(1, job_script, environment=UNSET)
    (rank,) = reported(job)
    assert rank["after"] == rank["before"]
    assert max(rank["before"]) > 1 or len(os.sched_getaffinity(0)) == 1
    assert "BLAS" not in job.err


@pytest.mark.parametrize("name", ["OMP", pytest.param("OPENBLAS", marks=pytest.mark.full)])
def test_what_the_user_set_stays(job_script, name):
    job = jobs.run(2, job_script, environment={**UNSET, f"{name}_NUM_THREADS": "2"})
    for rank in reported(job):
        assert rank["after"] == rank["before"]
        assert set(rank["late"]) == set(rank["before"])
    assert "BLAS" not in job.err
