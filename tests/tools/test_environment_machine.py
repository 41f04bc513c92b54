"""Memory and limits, as cgroups and the kernel set them, and what CuPy says of GPUs."""

import sys
from types import SimpleNamespace

from chainermn_tools.environment import machine
from tests.support.jobs.files import write


def limit(monkeypatch, folders):
    with monkeypatch.context() as patch:
        patch.setattr(machine, "cgroup_folders", lambda controller: iter(folders))
        return machine.memory()["cgroup_bytes"]


def test_the_tightest_memory_limit_of_nested_cgroups_counts(monkeypatch, tmp_path):
    write(tmp_path / "job" / "memory.max", "1073741824\n")
    write(tmp_path / "job" / "step" / "memory.max", "max\n")
    folders = list(machine.cgroup_folders("memory", "0::/job/step\n", tmp_path))
    assert limit(monkeypatch, folders) == 2**30


def test_version_1_of_cgroups_is_read(monkeypatch, tmp_path):
    write(tmp_path / "memory" / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    lines = "4:cpu,cpuacct:/docker\n3:memory:/\n0::/\n"
    assert (
        limit(monkeypatch, list(machine.cgroup_folders("memory", lines, tmp_path)))
        is None
    )


def test_nccl_is_reported_with_and_without_its_library(monkeypatch):
    """CuPy imports a stub where libnccl is not installed."""
    stub = SimpleNamespace(available=False)
    cuda = SimpleNamespace(nccl=stub)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    assert machine.nccl_version() == "absent"
    stub.available = True
    for code, version in ((2708, "2.7.8"), (22203, "2.22.3")):
        stub.get_version = lambda code=code: code
        assert machine.nccl_version() == version
