"""What is installed, under which names."""

from types import SimpleNamespace

from chainermn_tools.environment import packages


def test_missing_packages_are_none(monkeypatch):
    monkeypatch.setattr(packages.metadata, "distributions", lambda: iter(()))
    found = packages.package_versions()
    assert {"chainermn", "chainermn-comm", "chainer", "numpy", "cupy", "mpi4py"} <= set(
        found
    )
    assert set(found.values()) == {None}


def test_members_of_a_family_are_named(monkeypatch):
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
    assert found["cupy-cuda12x"] == "13.6.0"
    assert "cupy" not in found
    assert found["numpy"] == "2.4.6"


def test_a_package_without_an_init_file_still_has_a_place(tmp_path, monkeypatch):
    (tmp_path / "a_namespace_of_nobody").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path) in str(packages._origin("a_namespace_of_nobody"))
