"""The doctor's checks of Python, packages and MPI, each with its faults planted one by one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from chainermn_tools.doctor import facts
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.here import mpi, requirements, software
from chainermn_tools.environment import probe

LIMIT_SECONDS = 60


def context(**asked) -> Context:
    return Context(time.monotonic() + LIMIT_SECONDS, **asked)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


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
        ("1.25", ">=1.26", False),
        ("2.9.1", "~=2.0", True),
        ("3.0", "~=2.0", False),
        ("2.1.0rc1", ">=2.0", True),
        ("1.5", "", True),
        ("unknown", ">=3", True),
    ],
)
def test_versions_are_compared(version, conditions, fits):
    assert requirements.fits(version, Requirement(f"b{conditions}")) == fits


@given(st.text(), st.text())
def test_nonsense_in_metadata_is_no_error(version, requirement):
    found = requirements.misfits(["a"], lambda name: version, lambda name: [requirement])
    assert isinstance(found, list)


@pytest.mark.parametrize(
    ("requirement", "complains"),
    [
        ("b>=2", True),
        ("b (>=2)", True),
        ("b[extra]>=2", True),
        ("B>=2 ; extra == 'x'", False),
        ("b>=2; python_version < '3.10'", False),
        ("b>=2; python_version >= '3.10'", True),
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
