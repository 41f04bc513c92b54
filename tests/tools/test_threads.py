"""The share of a host's cores that a rank computes with."""

import os

import pytest

from _chainermn_limits import THREAD_VARIABLES
from chainermn_tools import threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    for name in (*THREAD_VARIABLES, *threads.LOCAL_SIZES, "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"):
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
        (SRUN | {"SLURM_NODEID": "0"}, "4"),
        (SRUN | {"SLURM_NODEID": "4"}, None),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, None),
        # MPICH's mpiexec starts one process a host by srun, and that the ranks.
        ({"MPI_LOCALNRANKS": "1", **SRUN}, "8"),
        ({"MPI_LOCALNRANKS": "2", "SLURM_CPUS_ON_NODE": "4"}, "2"),
        ({"MPI_LOCALNRANKS": "2", "OMP_NUM_THREADS": "7"}, "7"),
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


def test_the_least_of_affinity_cgroup_and_what_slurm_gives_counts(monkeypatch):
    assert threads.usable_cores() == 8
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "4")
    assert threads.usable_cores() == 4
    monkeypatch.setattr(threads, "tightest_cgroup", lambda: ("job", 2.9))
    assert threads.usable_cores() == 2
    monkeypatch.setattr(threads, "tightest_cgroup", lambda: ("job", 0.2))
    assert threads.usable_cores() == 1


def test_slurms_numbers_of_nodes():
    assert threads.expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="invalid literal"):
        threads.expand_counts("2(x3),")
