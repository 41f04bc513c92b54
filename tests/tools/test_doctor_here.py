"""The doctor's checks of memory, cores and Slurm, each with its faults planted one by one."""

from __future__ import annotations

import errno
import os
import socket

import pytest


@pytest.mark.parametrize(
    ("vendor", "total", "free", "ranks", "status", "fix"),
    [
        ("MPICH", 64, 60, None, "ok", None),
        ("MPICH", 64, 3, None, "failed", "ls -l"),
        ("MPICH", 64, 22, None, "failed", "ls -l"),
        ("MPICH", 8, 8, None, "failed", "--shm-size"),
        ("MPICH", 64, 60, 8, "warning", "--shm-size"),
        ("MPICH", 64, 60, 16, "failed", "--shm-size"),
        ("MPICH", 64, 30, 2, "warning", "--shm-size"),
        ("MPICH", 24105, 24000, 64, "ok", None),
        ("Open MPI", 64, 22, None, "ok", None),
        ("Open MPI", 64, 10, None, "warning", "--shm-size"),
        ("Open MPI", 64, 3, None, "failed", "ls -l"),
        (None, 64, 22, None, "failed", "ls -l"),
    ],
)
def test_too_little_shared_memory_is_named(machine, vendor, total, free, ranks, status, fix):
    machine.shared_memory(total, free)
    machine.mpi(vendor)
    found = machine.look("shared memory", ranks=ranks)
    assert found.status == status
    assert f"{free} MiB of {total} MiB" in found.found
    assert (found.fix is None) if fix is None else (fix in found.fix)


def test_the_largest_file_in_full_shared_memory_is_named(machine):
    machine.mpi()
    machine.shared_memory(64, 0, left=2 << 20, small=1)
    assert "'left', 2 MiB" in machine.look("shared memory").found


@pytest.mark.parametrize("name", ["statvfs", "posix_fallocate"])
def test_shared_memory_that_is_missing_or_cannot_be_written_is_named(machine, monkeypatch, name):
    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    machine.mpi()
    machine.shared_memory(64, 60)
    monkeypatch.setattr(os, name, refuse)
    found = machine.look("shared memory")
    assert (found.status, "Read-only" in found.found) == ("failed", True)


def test_a_siblings_memory_is_really_read(machine):
    """Either it is read, or the kernel says why not."""
    machine.mpi()
    found = machine.look("direct memory")
    why = found.details.get("reason", "ptrace_scope")
    refusals = ("ptrace_scope", os.strerror(errno.EPERM), os.strerror(errno.ENOSYS))
    assert found.found == "they may" if not found.details else any(one in why for one in refusals)


@pytest.mark.parametrize(
    ("vendor", "setting", "status"),
    [
        ("MPICH", None, "ok"),
        ("Open MPI", None, "ok"),
        ("MVAPICH2", None, "failed"),
        ("MVAPICH2", "0", "ok"),
        ("MVAPICH", "1", "failed"),
    ],
)
def test_forbidden_cma_matters_to_mvapich_alone(machine, vendor, setting, status):
    machine.mpi(vendor)
    machine.children(read_of_sibling=errno.EPERM)
    machine.variables(MV2_SMP_USE_CMA=setting)
    machine.ptrace_scope(1)
    found = machine.look("direct memory")
    assert (found.status, "ptrace_scope is 1" in found.found) == (status, True)
    assert status == "ok" or found.fix.startswith("export MV2_SMP_USE_CMA=0")


@pytest.mark.parametrize(
    ("usable", "ranks", "variables", "fix"),
    [
        (8, 8, {}, None),
        (8, None, {}, None),
        (4, 8, {}, "start at most 4 ranks"),
        (8, 4, {"OMP_NUM_THREADS": "2"}, None),
        (8, 4, {"OMP_NUM_THREADS": "4"}, "export OMP_NUM_THREADS=2"),
        (8, None, {"MKL_NUM_THREADS": "16"}, "export MKL_NUM_THREADS=8"),
        (8, 8, {"OMP_NUM_THREADS": "3,2"}, "export OMP_NUM_THREADS=1"),
        (8, 8, {"OMP_NUM_THREADS": "all"}, None),
    ],
)
def test_more_threads_than_cores_are_named(machine, usable, ranks, variables, fix):
    machine.cores(usable)
    machine.variables(**variables)
    found = machine.look("cores", ranks=ranks)
    assert found.status == ("ok" if fix is None else "warning")
    assert fix is None or found.fix.startswith(fix)
    assert found.details["usable"] == usable


@pytest.mark.parametrize(
    ("ranks", "hosts", "here", "started"),
    [
        (None, "", None, 2),
        (5, "", 5, 5),
        (None, "a:2,b:3", 3, 3),
        (None, "b,c", None, 2),
        (None, "b:9,c", None, 4),
        (5, "a.site,b", 3, 3),
        (9, "a:2,b:3", 3, 3),
        (4, "localhost:4", 4, 4),
    ],
)
def test_as_many_ranks_are_started_as_this_machine_is_to_run(
    machine, monkeypatch, ranks, hosts, here, started
):
    """Where hosts are to run them, as can meet and have cores here."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    asked = {"ranks": ranks, **({"hosts": hosts} if hosts else {})}
    machine.cores(1)
    said = machine.look("cores", **asked).found
    assert ("ranks: they take turns" in said) == (here is not None)
    assert here is None or f"for {here} ranks" in said
    machine.cores(4)
    machine.mpi()
    machine.ranks(status=1)
    assert f"0 of {started} ranks came up" in machine.look("ranks start", **asked).found


@pytest.mark.parametrize(
    ("method", "cards", "release", "variable", "status"),
    [
        ("fork", [], "4.18.0-1.el8", None, "ok"),
        ("fork", ["mlx5_0"], "4.18.0-1.el8", None, "warning"),
        ("fork", ["mlx5_0"], "4.18.0-1.el8", "1", "ok"),
        ("fork", ["mlx5_0"], "5.14.0-2", None, "ok"),
        ("forkserver", ["mlx5_0"], "4.18.0", None, "ok"),
    ],
)
def test_forking_beside_infiniband_is_named(machine, method, cards, release, variable, status):
    machine.forks(method, release, *cards)
    machine.variables(RDMAV_FORK_SAFE=variable)
    found = machine.look("start method")
    assert found.status == status
    assert method in found.found


# As Slurm sets them in `salloc -N 2 -n 3 -c 4`.
JOB = {
    "SLURM_JOB_ID": "81",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_CPUS_ON_NODE": "8",
}


@pytest.mark.parametrize(
    ("changes", "tasks", "text"),
    [
        ({}, 3, "2 nodes (node[01-02]), 3 tasks, 4 cores a task, 8 cores on this node"),
        ({"SLURM_NTASKS": ""}, 3, "2 nodes (node[01-02]), 3 tasks, "),
        ({"SLURM_NTASKS": "", "SLURM_TASKS_PER_NODE": "2(x3),1"}, 7, "2 nodes (node[01-02]), 7 "),
        ({"SLURM_NTASKS": "", "SLURM_TASKS_PER_NODE": "many"}, None, "2 nodes (node[01-02]), 4 "),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a"}, 3, "1 node (a), 3 tasks"),
    ],
)
def test_what_slurm_grants_is_read(machine, changes, tasks, text):
    machine.variables(**{**JOB, **changes})
    found = machine.look("scheduler")
    assert (found.status, found.details["tasks"]) == ("ok", tasks)
    assert found.found.startswith(f"Slurm's job 81 grants {text}")


def test_ranks_and_hosts_that_slurm_did_not_grant_are_named(machine):
    assert machine.look("scheduler").status == "skipped"
    machine.variables(**JOB)
    machine.program("scontrol", 'printf "node01\nnode02.site\n"')
    assert machine.look("scheduler", ranks=3).status == "ok"
    found = machine.look("scheduler", ranks=4)
    assert (found.status, found.fix.split("#")[0].strip()) == ("failed", "salloc -n 4")
    assert machine.look("scheduler", hosts="node01.site,node02,10.0.0.1").status == "ok"
    found = machine.look("scheduler", hosts="node01,node03")
    assert (found.status, "not node03" in found.found) == ("failed", True)
