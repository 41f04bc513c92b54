"""The doctor's checks of this machine, each with its faults planted one by one."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainermn_tools.doctor import HERE, facts
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.here import gpus, machine, memory, mpi, requirements, software
from chainermn_tools.environment import machine as examined
from chainermn_tools.environment import packages, probe
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


# Python and packages


@pytest.mark.parametrize(
    ("version", "status"), [((3, 9, 1), "failed"), ((3, 13, 9), "ok"), ((3, 14, 0), "warning")]
)
def test_old_and_new_pythons_are_named(monkeypatch, version, status):
    monkeypatch.setattr(software.sys, "version_info", version)
    answer = software.python.look(context())
    assert answer.status == status
    assert status == "ok" or "3.10 to 3.13" in answer.fix


@pytest.mark.parametrize(
    ("system", "implementation"), [("Darwin", "CPython"), ("Linux", "PyPy")], ids=str
)
def test_other_systems_and_implementations_are_named(monkeypatch, system, implementation):
    monkeypatch.setattr(software.platform, "system", lambda: system)
    monkeypatch.setattr(software.platform, "python_implementation", lambda: implementation)
    assert software.python.look(context()).status == "failed"


def distribution(folder: Path, name: str, version: str, *requires: str) -> None:
    """Metadata of a distribution that comes before the installed ones."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in requires)]
    (info / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def test_the_installed_packages_fit():
    answer = software.packages.look(context())
    assert answer.status == "ok", answer
    assert "chainermn-comm 2." in answer.found


def test_a_package_that_is_too_old_is_named(monkeypatch, tmp_path):
    distribution(tmp_path, "numpy", "1.20.3")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = software.packages.look(context())
    assert answer.status == "failed"
    assert "needs numpy>=1.26, not 1.20.3" in answer.found
    assert answer.fix == f"{sys.executable} -m pip install 'numpy>=1.26'"


def test_a_package_that_is_missing_is_named(monkeypatch, tmp_path):
    distribution(tmp_path, "chainermn-comm", "2.0.0", "numpy>=1.26", "left-pad>=3 ; extra == 'x'")
    distribution(tmp_path, "chainermn-tools", "2.0.0", "chainermn-comm~=2.0", "left-pad>=2")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = software.packages.look(context())
    assert answer.status == "failed"
    assert answer.found == "chainermn-tools needs left-pad>=2, which is missing"


def test_packages_of_ours_in_versions_that_do_not_fit_are_not_taken_from_the_index(
    monkeypatch, tmp_path
):
    distribution(tmp_path, "chainermn-comm", "1.9")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = software.packages.look(context())
    assert answer.status == "failed"
    assert "pip install 'chainermn" not in answer.fix


def test_two_cupys_are_named(monkeypatch, tmp_path):
    distribution(tmp_path, "cupy-cuda12x", "13.6.0")
    distribution(tmp_path, "cupy-cuda13x", "14.0.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = software.packages.look(context())
    assert answer.status == "warning"
    assert answer.fix.startswith("pip uninstall -y cupy-cuda12x cupy-cuda13x")


@pytest.mark.parametrize(
    ("version", "conditions", "fits"),
    [
        ("1.26.4", ">=1.26", True),
        ("2.0.0rc1", ">=2.0", True),
        ("1.25", ">=1.26", False),
        ("2.0", "~=2.0", True),
        ("2.9.1", "~=2.0", True),
        ("3.0", "~=2.0", False),
        ("2.0.9", "~=2.0.1", True),
        ("2.1", "~=2.0.1", False),
        ("2", "~=2.0", True),
        ("1.9", "~=2.0", False),
        ("3.2", ">=2.13.0,<3.0.0", False),
        ("1.4", "==1.4.*", True),
        ("1.5", "==1.4.*", False),
        ("1.5", "!=1.5.*", False),
        ("1.5.0", "==1.5", True),
        ("1.5", "", True),
        ("unknown", ">=3", True),
        ("1.5", "=== what", True),
    ],
)
def test_versions_are_compared(version, conditions, fits):
    assert requirements.fits(version, conditions) == fits


@given(st.text(), st.text())
def test_nonsense_in_metadata_is_no_error(version, requirement):
    assert requirements.fits(version, requirement) in (True, False)
    found = requirements.misfits(["a"], lambda name: version, lambda name: [requirement])
    assert isinstance(found, list)


@pytest.mark.parametrize(
    ("requirement", "complains"),
    [
        ("b>=2", True),
        ("b (>=2)", True),
        ("b[extra]>=2", True),
        ("B>=2 ; extra == 'x'", False),
        ("b>=2; python_version < '3.11'", False),
        ("b @ file:///b", False),
        ("b>=1", False),
    ],
)
def test_requirements_are_read_as_they_are_written(requirement, complains):
    def requires(name: str) -> list[str]:
        return [requirement] if name == "a" else []

    found = requirements.misfits(["A"], {"a": "1", "b": "1.0"}.get, requires)
    assert bool(found) == complains


def test_requirements_are_followed_in_circles_and_indirectly():
    needs = {"a": ["b"], "b": ["a", "c"], "c": ["d>=2"], "d": []}
    versions = {"a": "1", "b": "1", "c": "1", "d": "1"}
    assert requirements.misfits(["a"], versions.get, needs.__getitem__) == [("c", "d>=2", "1")]


# import chainermn


def imports(monkeypatch, origin: str | None, finder: str, meta: str | None = "2.0.0"):
    found = {"chainermn": origin, "chainer": None, "finder": finder}
    monkeypatch.setattr(software.probe, "in_child", lambda *_: found)
    monkeypatch.setattr(facts, "versions", lambda _: {"chainermn": meta})
    return software.import_chainermn.look(context())


FACADE, BUNDLED = "/x/chainermn_facade/__init__.py", "/x/site-packages/chainermn/__init__.py"


def test_which_chainermn_is_imported(monkeypatch):
    monkeypatch.delenv("CHAINERMN_USE_BUNDLED", raising=False)
    answer = imports(monkeypatch, FACADE, "registered")
    assert (answer.status, FACADE in answer.found) == ("ok", True)
    answer = imports(monkeypatch, BUNDLED, "not registered")
    assert (answer.status, ".pth" in answer.found) == ("failed", True)
    assert "import chainermn_comm" in answer.fix
    assert imports(monkeypatch, BUNDLED, "registered", None).status == "failed"
    assert imports(monkeypatch, BUNDLED, "registered", "1.3.1").status == "failed"
    assert imports(monkeypatch, None, "registered", None).status == "skipped"
    monkeypatch.setenv("CHAINERMN_USE_BUNDLED", "1")
    answer = imports(monkeypatch, BUNDLED, "registered")
    assert (answer.status, answer.fix) == ("warning", "unset CHAINERMN_USE_BUNDLED")


def test_a_chainer_that_cannot_be_imported_is_quoted(monkeypatch):
    def broken(*_):
        raise probe.Unavailable("ModuleNotFoundError: No module named 'pkg_resources'")

    monkeypatch.setattr(software.probe, "in_child", broken)
    monkeypatch.delenv("CHAINERMN_NO_COMPAT", raising=False)
    answer = software.import_chainer.look(context())
    assert (answer.status, "pkg_resources" in answer.found) == ("failed", True)
    assert "setuptools<82" in answer.fix, "what `chainermn explain` knows of it"
    monkeypatch.setenv("CHAINERMN_NO_COMPAT", "1")
    assert "unset CHAINERMN_NO_COMPAT" in software.import_chainer.look(context()).fix


# MPI

GCC = "Using built-in specs.\nTarget: x86_64-linux-gnu\nConfigured for Intel MPI, Open MPI\n"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        # What MPICH 5.0.2's and Open MPI 5.0.11's wheels print.
        (
            f'case $1 in -v) echo "mpicc for MPICH version 5.0.2\n{GCC}";; *) exit 1;; esac',
            ("MPICH", "5.0.2"),
        ),
        (
            'case $1 in --showme:version) echo "mpicc: Open MPI 5.0.11 (Language: C)";; '
            f'*) echo "{GCC}";; esac',
            ("Open MPI", "5.0.11"),
        ),
        (
            'case $1 in -v) echo "mpicc for MVAPICH2 version 2.3.7";; *) exit 1;; esac',
            ("MVAPICH", "2.3.7"),
        ),
        (
            'case $1 in -v) echo "mpiicc for the Intel(R) MPI Library 2021.10 for Linux*";; '
            "*) exit 1;; esac",
            ("Intel MPI", "2021.10"),
        ),
        (f'case $1 in -v) echo "{GCC}";; *) exit 1;; esac', (None, None)),
        ("exit 0", (None, None)),
        ("sleep 60", (None, None)),
    ],
    ids=["MPICH", "Open MPI", "MVAPICH", "Intel MPI", "plain", "silent", "hangs"],
)
def test_compilers_are_recognised(tmp_path, script, found):
    program(tmp_path / "mpicc", script)
    seconds = 0.5 if "sleep" in script else LIMIT_SECONDS
    assert mpi.compiler(str(tmp_path / "mpicc"), seconds) == found


def with_mpis(monkeypatch, library, launcher) -> Context:
    monkeypatch.setattr(facts, "library", lambda _: library)
    monkeypatch.setattr(facts, "launcher", lambda _: launcher)
    return context()


def an_mpi(vendor, version="5.0.2", path="/opt/bin/mpiexec") -> dict:
    shown = {"standard": "4.1", "description": ["what it says"], "path": path}
    return {"vendor": vendor, "version": version, **shown}


def test_an_mpiexec_of_another_mpi_is_named(monkeypatch):
    here = with_mpis(monkeypatch, an_mpi("MPICH"), an_mpi("Open MPI"))
    answer = mpi.mpi_match.look(here)
    assert answer.status == "failed"
    assert "mpi4py loads MPICH but /opt/bin/mpiexec is Open MPI's" in answer.found
    assert "PATH" in answer.fix
    assert (
        mpi.mpi_match.look(with_mpis(monkeypatch, an_mpi("MPICH"), an_mpi("MPICH"))).status == "ok"
    )


def test_an_mpiexec_that_nobody_knows_is_quoted(monkeypatch):
    here = with_mpis(monkeypatch, an_mpi("MPICH"), an_mpi(None, None))
    answer = mpi.mpiexec.look(here)
    assert (answer.status, "what it says" in answer.found) == ("warning", True)
    assert mpi.mpi_match.look(here).status == "skipped"


def test_an_mpi_that_does_not_load_gets_the_fix_that_explain_knows(monkeypatch):
    def broken(_):
        raise probe.Unavailable("RuntimeError: cannot load MPI library")

    monkeypatch.setattr(facts, "library", broken)
    answer = mpi.mpi4py.look(context())
    assert (answer.status, answer.fix.split()[:3]) == ("failed", ["pip", "install", "mpich"])


def test_no_mpiexec_on_path_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = mpi.mpiexec.look(context())
    assert (answer.status, "no mpiexec on PATH" in answer.found) == ("failed", True)
    assert answer.fix.startswith("export PATH=") or "pip install mpich" in answer.fix
    assert mpi.mpicc.look(context()).status == "skipped"


def test_a_compiler_of_another_mpi_is_named(monkeypatch, tmp_path):
    program(tmp_path / "mpicc", 'echo "mpicc: Open MPI 4.1.6 (Language: C)"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = mpi.mpicc.look(with_mpis(monkeypatch, an_mpi("MPICH"), an_mpi("MPICH")))
    assert (answer.status, "Open MPI 4.1.6" in answer.found) == ("warning", True)
    answer = mpi.mpicc.look(with_mpis(monkeypatch, an_mpi("Open MPI"), an_mpi("Open MPI")))
    assert answer.status == "ok"


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


# GPUs

H200 = "570.86.15, NVIDIA H200, 143771 MiB"


def with_gpus(monkeypatch, lines, cupy=None, devices=2, nccl="2.22.3", files=0, **variables):
    """A machine as its driver, CuPy and NCCL describe it; exceptions are raised."""

    def gives(value):
        def give(*_):
            if isinstance(value, Exception):
                raise value
            return value

        return give

    versions = dict.fromkeys((*packages.OURS, "cupy", "nvidia-nccl"))
    if cupy is not None:
        del versions["cupy"]
        versions["cupy-cuda12x"] = cupy
    seen = (
        devices if isinstance(devices, Exception) else {"cuda": "12.4", "devices": [{}] * devices}
    )
    monkeypatch.setattr(facts, "versions", gives(versions))
    monkeypatch.setattr(gpus, "of_driver", gives(lines))
    monkeypatch.setattr(gpus, "of_cupy", gives(seen))
    monkeypatch.setattr(gpus.gpus, "with_cupy", gives(nccl))
    monkeypatch.setattr(gpus.probe, "in_child", gives([2, 4]))
    monkeypatch.setattr(gpus, "device_files", lambda: [f"nvidia{n}" for n in range(files)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


NO_SMI = probe.Unavailable("no nvidia-smi on PATH")
# What nvidia-smi prints after an update of the driver without a restart.
MISMATCH = probe.Unavailable(
    "nvidia-smi ended with exit code 18: Failed to initialize NVML: Driver/library version mismatch"
)


@pytest.mark.parametrize(
    ("lines", "files", "status"),
    [
        ([H200, H200], 2, "ok"),
        (NO_SMI, 0, "skipped"),
        (NO_SMI, 1, "ok"),
        (MISMATCH, 1, "failed"),
        (MISMATCH, 0, "skipped"),
        (["No devices were found"], 0, "skipped"),
        ([], 0, "skipped"),
    ],
)
def test_drivers_are_judged(monkeypatch, lines, files, status):
    with_gpus(monkeypatch, lines, files=files)
    assert gpus.driver.look(context()).status == status


def test_cupy_missing_broken_and_blind_is_told_apart(monkeypatch):
    with_gpus(monkeypatch, NO_SMI, cupy="13.6.0")
    assert gpus.cupy.look(context()).status == "skipped", "no GPU to use"
    with_gpus(monkeypatch, [H200])
    answer = gpus.cupy.look(context())
    assert (answer.status, answer.fix.split()[-1]) == ("warning", "'cupy-cuda12x[ctk]'")
    with_gpus(monkeypatch, [H200.replace("570", "580")])
    assert gpus.cupy.look(context()).fix.split()[-1] == "'cupy-cuda13x[ctk]'"
    broken = probe.Unavailable("ImportError: libcublas.so.12: cannot open shared object file")
    with_gpus(monkeypatch, [H200], cupy="13.6.0", devices=broken)
    answer = gpus.cupy.look(context())
    assert (answer.status, "libcublas" in answer.found) == ("failed", True)
    with_gpus(monkeypatch, [H200], cupy="13.6.0", devices=0)
    assert gpus.cupy.look(context()).status == "failed"
    with_gpus(monkeypatch, [H200], cupy="13.6.0", CUDA_VISIBLE_DEVICES="-1")
    answer = gpus.cupy.look(context())
    assert (answer.status, answer.fix) == ("warning", "unset CUDA_VISIBLE_DEVICES")
    with_gpus(monkeypatch, [H200], cupy="13.6.0")
    assert "sees 2 GPUs" in gpus.cupy.look(context()).found


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.22.3", "ok", "2.22.3"),
        ("2.7.8", "ok", "bfloat16"),
        ("2.3.7", "failed", "too old"),
        ("absent", "warning", "absent"),
    ],
)
def test_an_absent_nccl_is_not_an_old_one(monkeypatch, version, status, said):
    with_gpus(monkeypatch, [H200], cupy="13.6.0", nccl=version)
    answer = gpus.nccl.look(context())
    assert (answer.status, said in answer.found) == (status, True)
    assert status == "ok" or answer.fix.endswith("pip install -U nvidia-nccl-cu12")


@pytest.mark.parametrize(
    ("ranks", "setting", "status"),
    [
        (None, None, "ok"),
        (2, None, "ok"),
        (4, None, "failed"),
        (2, "0,1", "ok"),
        (2, "0,1,9", "failed"),
        (None, "GPU-1,GPU-2,nonsense", "failed"),
    ],
)
def test_fewer_visible_gpus_than_ranks_are_named(monkeypatch, ranks, setting, status):
    variables = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    with_gpus(monkeypatch, [H200, H200], cupy="13.6.0", devices=2, **variables)
    answer = gpus.visible_gpus.look(context(ranks=ranks))
    assert answer.status == status
    assert "2 visible" in answer.found


def test_the_oldest_nccl_is_that_of_the_communicators():
    assert probe.in_child(gpus.oldest_nccl, LIMIT_SECONDS) == [2, 4]


def test_device_files_are_those_of_gpus(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(gpus, "DRIVER_FOLDERS", (tmp_path, tmp_path / "none"))
    assert sorted(gpus.device_files()) == ["nvidia0", "nvidia1"]
    (tmp_path / "proc" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(gpus, "DRIVER_FOLDERS", (tmp_path / "dev", tmp_path / "proc"))
    assert gpus.device_files() == ["0000:01:00.0"]
