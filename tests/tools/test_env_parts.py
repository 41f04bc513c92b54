"""The parts of `chainermn env` that read what other programs and the kernel write."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from chainermn_tools.environment import gpus, machine, mpi, packages, probe, text

HYDRA = "HYDRA build details:\n    Version:                                 4.2.0\n"


@pytest.mark.parametrize(
    ("printed", "vendor", "version"),
    [
        (HYDRA, "MPICH", "4.2.0"),
        ("mpiexec (OpenRTE) 4.1.6\n\nReport bugs to http://www.open-mpi.org/", "Open MPI", "4.1.6"),
        ("mpiexec (Open MPI) 5.0.11\n", "Open MPI", "5.0.11"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 2023", "Intel MPI", "2021.10"),
        (f"{HYDRA} Configure options: --prefix=/opt/mvapich2", "MVAPICH", "4.2.0"),
        ("prterun (PRRTE) 3.0.5", "Open MPI", "3.0.5"),
        ("slurm launcher", None, None),
    ],
)
def test_launchers_are_recognised(printed, vendor, version):
    assert mpi.recognise(printed) == {"vendor": vendor, "version": version}


@pytest.mark.parametrize(
    ("library", "launcher", "fits"),
    [
        (("MPICH", "5.0.2"), ("MPICH", "4.2.0"), True),
        (("MVAPICH2", "2.3.7"), ("MPICH", "3.2.1"), True),
        (("MVAPICH", "4.0"), ("MVAPICH", "4.0"), True),
        (("Open MPI", "5.0.11"), ("Open MPI", "5.0.3"), True),
        (("Open MPI", "5.0.11"), ("Open MPI", "4.1.6"), False),
        (("Open MPI", "5.0.11"), ("MPICH", "4.2.0"), False),
        (("MPICH", "5.0.2"), ("Open MPI", "5.0.2"), False),
        (("Intel MPI", "2021.10"), ("MPICH", "4.2.0"), False),
    ],
)
def test_library_and_launcher_are_compared(library, launcher, fits):
    reason = mpi.mismatch(
        {"vendor": library[0], "version": library[1]},
        {"vendor": launcher[0], "version": launcher[1], "path": "/opt/mpiexec"},
    )
    assert (reason is None) == fits
    assert fits or "/opt/mpiexec" in str(reason)


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_the_tightest_quota_of_nested_cgroups_counts(tmp_path):
    write(tmp_path / "job" / "cpu.max", "350000 100000\n")
    write(tmp_path / "job" / "step" / "cpu.max", "max 100000\n")
    write(tmp_path / "job" / "memory.max", "1073741824\n")
    write(tmp_path / "job" / "step" / "memory.max", "max\n")
    folders = list(machine.cgroup_folders("cpu", "0::/job/step\n", tmp_path))
    assert machine._least(machine.cpu_quota(folder) for folder in folders) == 3.5
    assert machine._least(machine._memory_limit(folder) for folder in folders) == 2**30


def test_version_1_of_cgroups_is_read(tmp_path):
    write(tmp_path / "cpu,cpuacct" / "docker" / "cpu.cfs_quota_us", "150000\n")
    write(tmp_path / "cpu,cpuacct" / "docker" / "cpu.cfs_period_us", "100000\n")
    write(tmp_path / "cpu,cpuacct" / "cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cpu,cpuacct" / "cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    lines = "4:cpu,cpuacct:/docker\n3:memory:/\n0::/\n"
    cpu = machine.cgroup_folders("cpu", lines, tmp_path)
    memory = machine.cgroup_folders("memory", lines, tmp_path)
    assert machine._least(machine.cpu_quota(folder) for folder in cpu) == 1.5
    assert machine._least(machine._memory_limit(folder) for folder in memory) is None


def test_a_quota_below_one_core_leaves_one_core(monkeypatch, tmp_path):
    write(tmp_path / "cpu.max", "20000 100000\n")
    monkeypatch.setattr(machine, "cgroup_folders", lambda controller: iter([tmp_path]))
    assert machine.cores()["cgroup"] == 0.2
    assert machine.cores()["usable"] == 1


def test_a_quota_between_two_numbers_of_cores_counts_as_the_lower(monkeypatch, tmp_path):
    """As the ranks count them when they limit the BLAS's threads."""
    write(tmp_path / "cpu.max", "290000 100000\n")
    monkeypatch.setattr(machine, "cgroup_folders", lambda controller: iter([tmp_path]))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    assert machine.cores()["usable"] == 2


def test_no_limit_is_none(monkeypatch):
    infinite = machine.resource.RLIM_INFINITY
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (infinite, infinite))
    assert set(machine.limits().values()) == {None}


def test_one_probe_that_fails_or_hangs_leaves_the_others():
    never = threading.Event()

    def exits():
        raise SystemExit(3)

    def has_no_answer():
        raise probe.Unavailable("there is none")

    found = probe.together(
        {
            "good": lambda: 1,
            "hangs": never.wait,
            "fails": lambda: 1 / 0,
            "exits": exits,
            "none": has_no_answer,
        },
        seconds=1,
    )
    never.set()
    assert list(found) == ["good", "hangs", "fails", "exits", "none"]
    assert found["good"] == 1
    assert found["hangs"] == {"unavailable": "no answer within 1 s"}
    assert found["fails"] == {"unavailable": "ZeroDivisionError: division by zero"}
    assert found["exits"] == {"unavailable": "SystemExit: 3"}
    assert found["none"] == {"unavailable": "there is none"}


def test_missing_packages_are_none(monkeypatch):
    monkeypatch.setattr(packages.metadata, "distributions", lambda: iter(()))
    found = packages.packages()
    assert {"chainermn", "chainermn-comm", "chainer", "numpy", "cupy", "mpi4py"} <= set(found)
    assert set(found.values()) == {None}


def test_members_of_a_family_are_named(monkeypatch):
    class Distribution:
        def __init__(self, name, version):
            self.metadata = {"Name": name, "Version": version}

    installed = [
        Distribution("cupy_cuda12x", "13.6.0"),
        Distribution("NumPy", "2.4.6"),
        Distribution("numpy", "1.0"),  # hidden by the one before it
        Distribution(None, None),  # left by an interrupted installation
    ]
    monkeypatch.setattr(packages.metadata, "distributions", lambda: iter(installed))
    found = packages.packages()
    assert found["cupy-cuda12x"] == "13.6.0"
    assert "cupy" not in found
    assert found["numpy"] == "2.4.6"


def test_a_package_without_an_init_file_still_has_a_place(tmp_path, monkeypatch):
    (tmp_path / "a_namespace_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path) in str(packages._origin("a_namespace_of_nobody"))


def test_text_says_what_is_unavailable_at_any_depth():
    found = {
        "schema": 1,
        "memory": {"total_bytes": 3 * 2**30, "small_bytes": 2**20, "limit_bytes": None},
        "gpus": {"driver": {"unavailable": "no driver"}, "devices": [], "match": False},
        "topology": {"unavailable": "no mpiexec"},
        "launcher": {"description": ["very", "long"], "ranks": [{"rank": 0}, {"rank": 1}]},
    }
    file = io.StringIO()
    text.render(found, Console(file=file))
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    for line in (
        "total 3.0 GiB",
        "small 1 MiB",
        "limit none",
        "driver unavailable: no driver",
        "devices none",
        "match no",
        "unavailable: no mpiexec",
        "ranks rank 0",
        "rank 1",
    ):
        assert line in lines
    assert "very" not in file.getvalue()


def test_nccl_is_reported_with_and_without_its_library(monkeypatch):
    """CuPy imports a stub where libnccl is not installed."""
    stub = SimpleNamespace(available=False)
    cuda = SimpleNamespace(nccl=stub)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    assert gpus.nccl() == "absent"
    stub.available = True
    for code, version in ((2708, "2.7.8"), (22203, "2.22.3")):
        stub.get_version = lambda code=code: code
        assert gpus.nccl() == version


@pytest.mark.parametrize(
    ("printed", "quoted"),
    [
        ("", ""),
        ("-----\nno\n  luck\n-----", ": no luck"),
        ("first " + "x" * 500 + " last", f": first {'x' * 194} ... {'x' * 195} last"),
    ],
)
def test_a_failure_is_quoted_on_one_line(printed, quoted):
    assert probe._quote(printed) == quoted
