"""Memory and limits, as cgroups and the kernel set them, and what CuPy says of GPUs."""

import sys
from types import SimpleNamespace

from chainermn_tools.environment import machine
from tests.support.jobs.commands import write


def limit(monkeypatch, membership, root):
    folders = list(machine.cgroup_folders("memory", membership, root))
    with monkeypatch.context() as patch:
        patch.setattr(machine, "cgroup_folders", lambda _: folders)
        return machine.memory()["cgroup_bytes"]


def test_the_tightest_memory_limit_of_nested_cgroups_counts(monkeypatch, tmp_path):
    write(tmp_path / "job" / "memory.max", "1073741824\n")
    write(tmp_path / "job" / "step" / "memory.max", "max\n")
    assert limit(monkeypatch, "0::/job/step\n", tmp_path) == 2**30


def test_version_1_of_cgroups_is_read(monkeypatch, tmp_path):
    file = tmp_path / "memory" / "memory.limit_in_bytes"
    write(file, f"{2**63 - 4096}\n")
    lines = "4:cpu,cpuacct:/docker\n3:memory:/\n0::/\n"
    assert limit(monkeypatch, lines, tmp_path) is None
    file.write_text("4096\n")
    assert limit(monkeypatch, lines, tmp_path) == 4096


def test_nccl_may_be_old_or_absent(monkeypatch):
    """CuPy imports a stub where libnccl is not installed."""
    nccl = SimpleNamespace(available=False, get_version=lambda: 2708)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=nccl))
    assert machine.nccl_version() == "absent"
    nccl.available = True
    assert machine.nccl_version() == "2.7.8"
