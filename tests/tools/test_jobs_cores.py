"""The cores that ranks may use."""

import _chainermn_limits
from chainermn_tools.jobs import cores
from tests.support.files import write


def quota(monkeypatch, folders):
    with monkeypatch.context() as patch:
        patch.setattr(_chainermn_limits, "cgroup_folders", lambda *_: iter(folders))
        return cores.available_cores()["cgroup"]


def test_the_tightest_quota_of_nested_cgroups_counts(monkeypatch, tmp_path):
    write(tmp_path / "job" / "cpu.max", "350000 100000\n")
    write(tmp_path / "job" / "step" / "cpu.max", "max 100000\n")
    folders = list(_chainermn_limits.cgroup_folders("cpu", "0::/job/step\n", tmp_path))
    assert quota(monkeypatch, folders) == 3.5


def test_version_1_of_cgroups_is_read(monkeypatch, tmp_path):
    for folder, microseconds in (("cpu,cpuacct", -1), ("cpu,cpuacct/docker", 150000)):
        write(tmp_path / folder / "cpu.cfs_quota_us", f"{microseconds}\n")
        write(tmp_path / folder / "cpu.cfs_period_us", "100000\n")
    folders = list(
        _chainermn_limits.cgroup_folders("cpu", "4:cpu,cpuacct:/docker\n0::/\n", tmp_path)
    )
    assert quota(monkeypatch, folders) == 1.5


def test_a_quota_counts_as_the_lower_number_of_cores_and_as_one_at_least(monkeypatch, tmp_path):
    """As the ranks count them when they limit the BLAS's threads."""
    monkeypatch.setattr(_chainermn_limits, "cgroup_folders", lambda *_: iter([tmp_path]))
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, usable in ((0.2, 1), (2.9, 2)):
        (tmp_path / "cpu.max").write_text(f"{quota * 100_000:.0f} 100000\n")
        assert cores.available_cores()["cgroup"] == quota
        assert cores.available_cores()["usable"] == usable
