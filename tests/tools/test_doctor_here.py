"""The doctor's checks of memory, cores and Slurm, each with its faults planted one by one."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from chainermn_tools.doctor import HERE, facts
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.here import machine, memory
from chainermn_tools.environment import machine as examined
from chainermn_tools.environment import probe
from chainermn_tools.launch.hosts import from_list

MIB = 1 << 20
LIMIT_SECONDS = 60


def context(**asked) -> Context:
    return Context(time.monotonic() + LIMIT_SECONDS, **asked)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def slurm_gone(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def test_names_are_unique_and_every_check_asks():
    names = [check.name for check in HERE.checks]
    assert len(set(names)) == len(names)
    assert all(check.question.endswith("?") for check in HERE.checks)


# Memory


def disk(monkeypatch, total: int, free: int) -> None:
    found = {"total_bytes": total, "free_bytes": free}
    monkeypatch.setattr(memory.machine, "shared_memory", lambda: found)


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
def test_too_little_shared_memory_is_named(monkeypatch, vendor, total, free, ranks, status, fix):
    disk(monkeypatch, total * MIB, free * MIB)
    monkeypatch.setattr(memory, "_vendor", lambda _: vendor)
    answer = memory.shared_memory.look(context(ranks=ranks))
    assert answer.status == status
    assert f"{free} MiB of {total} MiB" in answer.found
    assert fix is None or fix in answer.fix


def test_statvfs_is_what_is_asked(monkeypatch):
    full = SimpleNamespace(f_frsize=4096, f_blocks=64 * 256, f_bavail=0)
    monkeypatch.setattr(examined.os, "statvfs", lambda _: full)
    answer = memory.shared_memory.look(context())
    assert (answer.status, "0 MiB of 64 MiB are free" in answer.found) == ("failed", True)


def test_the_largest_file_in_full_shared_memory_is_named(monkeypatch, tmp_path):
    (tmp_path / "left behind").write_bytes(b"x" * 2 * MIB)
    (tmp_path / "small").write_bytes(b"x")
    monkeypatch.setattr(memory, "FOLDER", tmp_path)
    disk(monkeypatch, 64 * MIB, 0)
    assert "'left behind', 2 MiB" in memory.shared_memory.look(context()).found


def test_shared_memory_that_cannot_be_written_is_named(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(memory.tempfile, "TemporaryFile", refuse)
    disk(monkeypatch, 64 * MIB, 60 * MIB)
    answer = memory.shared_memory.look(context())
    assert (answer.status, "Read-only" in answer.found) == ("failed", True)


def test_missing_shared_memory_is_named(monkeypatch):
    def missing():
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(memory.machine, "shared_memory", missing)
    assert memory.shared_memory.look(context()).status == "failed"


def test_a_siblings_memory_is_really_read():
    """Either it is read, or the kernel says why not."""
    error = probe.in_child(memory.read_of_sibling, LIMIT_SECONDS)
    assert error in (0, errno.EPERM, errno.ENOSYS)
    nobodys = 8
    assert memory._read(os.getpid(), nobodys) in (errno.EFAULT, errno.EPERM, errno.ENOSYS)


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
def test_forbidden_cma_matters_to_mvapich_alone(monkeypatch, vendor, setting, status):
    monkeypatch.setattr(memory.probe, "in_child", lambda *_: errno.EPERM)
    monkeypatch.setattr(memory.machine, "ptrace_scope", lambda: 1)
    monkeypatch.setattr(facts, "library", lambda _: {"vendor": vendor})
    monkeypatch.delenv("MV2_SMP_USE_CMA", raising=False)
    if setting is not None:
        monkeypatch.setenv("MV2_SMP_USE_CMA", setting)
    answer = memory.direct_memory.look(context())
    assert (answer.status, "ptrace_scope is 1" in answer.found) == (status, True)
    assert status == "ok" or answer.fix.startswith("export MV2_SMP_USE_CMA=0")


# Cores, start method, scheduler


def with_cores(monkeypatch, usable: int, **variables: str) -> None:
    found = {"machine": 64, "affinity": usable, "cgroup": None, "usable": usable}
    monkeypatch.setattr(machine, "usable_cores", lambda: found)
    for name in machine.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


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
def test_more_threads_than_cores_are_named(monkeypatch, usable, ranks, variables, fix):
    with_cores(monkeypatch, usable, **variables)
    answer = machine.cores.look(context(ranks=ranks))
    assert answer.status == ("ok" if fix is None else "warning")
    assert fix is None or answer.fix.startswith(fix)
    assert answer.details["usable"] == usable


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
def test_forking_beside_infiniband_is_named(
    monkeypatch, tmp_path, method, cards, release, variable, status
):
    monkeypatch.setattr(machine.multiprocessing, "get_start_method", lambda _: method)
    monkeypatch.setattr(machine.platform, "release", lambda: release)
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path if cards else tmp_path / "none")
    for name in machine.FORK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv("RDMAV_FORK_SAFE", variable)
    for card in cards:
        (tmp_path / card).mkdir()
    answer = machine.start_method.look(context())
    assert answer.status == status
    assert method in answer.found


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
def test_what_slurm_grants_is_read(changes, tasks, text):
    found = machine.slurm({**JOB, **changes})
    assert found["tasks"] == tasks
    assert found["text"].startswith(text)


def test_ranks_and_hosts_that_slurm_did_not_grant_are_named(monkeypatch, tmp_path, slurm_gone):
    assert machine.scheduler.look(context()).status == "skipped"
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    program(tmp_path / "scontrol", 'printf "node01\nnode02.site\n"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.scheduler.look(context(ranks=3)).status == "ok"
    answer = machine.scheduler.look(context(ranks=4))
    assert (answer.status, answer.fix.split("#")[0].strip()) == ("failed", "salloc -n 4")
    good = from_list("node01.site,node02,10.0.0.1")
    assert machine.scheduler.look(context(hosts=good)).status == "ok"
    answer = machine.scheduler.look(context(hosts=from_list("node01,node03")))
    assert (answer.status, "not node03" in answer.found) == ("failed", True)
