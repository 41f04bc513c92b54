"""What is installed, under which names."""

from types import SimpleNamespace

from chainermn_tools.environment import packages


def test_packages_are_told_by_name_and_members_of_a_family_each(monkeypatch):
    # The second NumPy is hidden by the one before it; an interrupted installation left
    # the last.
    there = [
        ("cupy_cuda12x", "13.6.0"),
        ("NumPy", "2.4.6"),
        ("numpy", "1.0"),
        (None, None),
    ]
    installed = [SimpleNamespace(metadata={"Name": n, "Version": v}) for n, v in there]
    monkeypatch.setattr(packages.metadata, "distributions", lambda: iter(installed))
    found = packages.package_versions()
    versions = {name: version for name, version in found.items() if version}
    assert versions == {"cupy-cuda12x": "13.6.0", "numpy": "2.4.6"}
    missing = {"chainermn", "chainermn-comm", "chainer", "mpi4py", "nvidia-nccl"}
    assert missing <= found.keys()
    assert "cupy" not in found


def test_a_package_without_an_init_file_still_has_a_place(tmp_path, monkeypatch):
    (tmp_path / "a_namespace_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path) in str(packages._origin("a_namespace_of_nobody"))
