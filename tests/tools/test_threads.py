"""The share of a host's cores that a rank computes with."""

import os
from functools import partial

import pytest

import _chainermn_limits
from _chainermn_limits import THREAD_VARIABLES
from chainermn_tools import threads
from tests.support.jobs.commands import write

SLURMS = ("SLURM_CPUS_ON_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    for name in (*THREAD_VARIABLES, *threads.LOCAL_SIZES, *SLURMS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(threads, "tightest_cgroup", lambda: None)


SRUN = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),4", "SLURM_NODEID": "3"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"MPI_LOCALNRANKS": "2"}, "4"),
        ({"MPI_LOCALNRANKS": "20"}, "1"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "2"),
        (SRUN, "2"),
        (SRUN | {"SLURM_NODEID": "4"}, None),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, None),
        # MPICH's mpiexec starts one process a host by srun, and that the ranks.
        ({"MPI_LOCALNRANKS": "1", **SRUN}, "8"),
        ({"MPI_LOCALNRANKS": "2", "SLURM_CPUS_ON_NODE": "4"}, "2"),
        ({"MPI_LOCALNRANKS": "2", "MKL_NUM_THREADS": "7"}, None),
        ({}, None),
    ],
)
def test_a_rank_takes_its_share_unless_the_user_chose(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", variables.get("OMP_NUM_THREADS", ""))
    threads.divide_cores()
    assert (os.environ["OMP_NUM_THREADS"] or None) == expected


@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        (
            {"job/cpu.max": "350000 100000", "job/step/cpu.max": "max 100000"},
            "0::/job/step",
            (3.5, 3),
        ),
        (
            {
                "cpu,cpuacct/docker/cpu.cfs_quota_us": "150000",
                "cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
            },
            "4:cpu,cpuacct:/docker\n0::/",
            (1.5, 1),
        ),
        ({"cpu.max": "20000 100000"}, "0::/", (0.2, 1)),
    ],
    ids=["nested", "version 1", "less than a core"],
)
def test_the_tightest_quota_of_cgroups_counts(
    monkeypatch, tmp_path, files, membership, cores
):
    """As the ranks count it when they limit the BLAS's threads."""
    for name, text in files.items():
        write(tmp_path / name, f"{text}\n")
    tightest = partial(_chainermn_limits.tightest_cgroup, f"{membership}\n", tmp_path)
    monkeypatch.setattr(threads, "tightest_cgroup", tightest)
    found = threads.available_cores()
    assert (found["cgroup"], found["usable"]) == cores
