"""Cores, memory and limits, as cgroups and the kernel set them."""

from pathlib import Path

from chainermn_tools.environment import machine


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
    for folder, quota in (("cpu,cpuacct", -1), ("cpu,cpuacct/docker", 150000)):
        write(tmp_path / folder / "cpu.cfs_quota_us", f"{quota}\n")
        write(tmp_path / folder / "cpu.cfs_period_us", "100000\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    lines = "4:cpu,cpuacct:/docker\n3:memory:/\n0::/\n"
    cpu = machine.cgroup_folders("cpu", lines, tmp_path)
    memory = machine.cgroup_folders("memory", lines, tmp_path)
    assert machine._least(machine.cpu_quota(folder) for folder in cpu) == 1.5
    assert machine._least(machine._memory_limit(folder) for folder in memory) is None


def test_a_quota_counts_as_the_lower_number_of_cores_and_as_one_at_least(monkeypatch, tmp_path):
    """As the ranks count them when they limit the BLAS's threads."""
    monkeypatch.setattr(machine, "cgroup_folders", lambda controller: iter([tmp_path]))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, usable in ((0.2, 1), (2.9, 2)):
        write(tmp_path / "cpu.max", f"{quota * 100_000:.0f} 100000\n")
        assert machine.cores()["cgroup"] == quota
        assert machine.cores()["usable"] == usable


def test_no_limit_is_none(monkeypatch):
    infinite = machine.resource.RLIM_INFINITY
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (infinite, infinite))
    assert set(machine.limits().values()) == {None}
