"""Memory and limits, as cgroups and the kernel set them."""

from pathlib import Path

from chainermn_tools.environment import machine


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_the_tightest_memory_limit_of_nested_cgroups_counts(tmp_path):
    write(tmp_path / "job" / "memory.max", "1073741824\n")
    write(tmp_path / "job" / "step" / "memory.max", "max\n")
    folders = machine.cgroup_folders("memory", "0::/job/step\n", tmp_path)
    assert machine._least(machine._memory_limit(folder) for folder in folders) == 2**30


def test_version_1_of_cgroups_is_read(tmp_path):
    write(tmp_path / "memory" / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    lines = "4:cpu,cpuacct:/docker\n3:memory:/\n0::/\n"
    memory = machine.cgroup_folders("memory", lines, tmp_path)
    assert machine._least(machine._memory_limit(folder) for folder in memory) is None


def test_no_limit_is_none(monkeypatch):
    infinite = machine.resource.RLIM_INFINITY
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (infinite, infinite))
    assert set(machine.limits().values()) == {None}
