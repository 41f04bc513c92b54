"""The doctor's checks of Python, packages and MPI, each with its faults planted one by one."""

from __future__ import annotations

import platform
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.doctor import Machine, Unavailable


@pytest.mark.parametrize(
    ("version", "status"), [((3, 9, 1), "failed"), ((3, 13, 9), "ok"), ((3, 14, 0), "warning")]
)
def test_old_and_new_pythons_are_named(machine, monkeypatch, version, status):
    monkeypatch.setattr(sys, "version_info", version)
    found = machine.look("python")
    assert found.status == status
    assert status == "ok" or "3.10 to 3.13" in found.fix


@pytest.mark.parametrize(
    ("name", "value"), [("system", "Darwin"), ("python_implementation", "PyPy")]
)
def test_other_systems_and_implementations_are_named(machine, monkeypatch, name, value):
    monkeypatch.setattr(platform, name, lambda: value)
    found = machine.look("python")
    assert (found.status, value in found.found) == ("failed", True)


def test_the_installed_packages_fit(machine):
    found = machine.look("packages")
    assert found.status == "ok", found
    assert "chainermn-comm 2." in found.found


def test_a_package_that_is_too_old_is_named(machine):
    machine.package("numpy", "1.20.3")
    found = machine.look("packages")
    assert found.status == "failed"
    assert "needs numpy>=1.26, not 1.20.3" in found.found
    assert found.fix == f"{sys.executable} -m pip install 'numpy>=1.26'"


def test_each_need_is_judged_as_it_is_written_and_others_are_not(machine):
    """Directly or not, in circles, in every spelling; what can't be read isn't judged."""
    machine.package(
        *("chainermn-comm", "2.0.0"),
        *("b>=2", "b (>=2.1)", "b[extra]>=2.2", "b>=2.3; python_version >= '3.10'"),
        *("B>=2.4 ; extra == 'x'", "b>=2.5; python_version < '3.10'", "b @ file:///b", "b>=1"),
        *("left-pad>=3 ; extra == 'x'", "odd>=3", "after~=2.0", "before>=2.0", "new~=2.0"),
        *("indirect", "nonsense >> 3"),
    )
    for name, version in (("b", "1.0"), ("odd", "unknown"), ("after", "2.9.1"), ("new", "3.0")):
        machine.package(name, version)
    machine.package("before", "2.1.0rc1")
    machine.package("indirect", "1", "chainermn-comm", "left-pad>=2")
    found = machine.look("packages")
    assert found.status == "failed"
    assert found.found.split("; ") == [
        *(f"chainermn-comm needs b>=2{minor}, not 1.0" for minor in ("", ".1", ".2", ".3")),
        "chainermn-comm needs new~=2.0, not 3.0",
        "indirect needs left-pad>=2, which is missing",
    ]


def test_packages_of_ours_in_versions_that_do_not_fit_are_not_taken_from_the_index(machine):
    machine.package("chainermn-comm", "1.9")
    found = machine.look("packages")
    assert (found.status, "chainermn-comm" in found.found) == ("failed", True)
    assert "pip install 'chainermn" not in found.fix


def test_two_cupys_are_named(machine):
    machine.package("cupy-cuda12x", "13.6.0")
    machine.package("cupy-cuda13x", "14.0.0")
    found = machine.look("packages")
    assert found.status == "warning"
    assert found.fix.startswith("pip uninstall -y cupy-cuda12x cupy-cuda13x")


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=20)
@given(texts, texts)
def test_nonsense_in_metadata_is_no_error_of_the_doctor(tmp_path_factory, version, requirement):
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, tmp_path_factory.mktemp("nonsense"))
        machine.package("chainermn-comm", version, requirement)
        machine.packages(chainermn_comm="2.0.0")
        assert "the check itself failed" not in machine.look("packages").found


FACADE, BUNDLED = "/x/chainermn_facade/__init__.py", "/x/site-packages/chainermn/__init__.py"


@pytest.mark.parametrize(
    ("origin", "finder", "version", "status", "said", "fix"),
    [
        (FACADE, "registered", "2.0.0", "ok", FACADE, None),
        (BUNDLED, "not registered", "2.0.0", "failed", ".pth", "import chainermn_comm"),
        (BUNDLED, "registered", "2.0.0", "failed", BUNDLED, "install"),
        (BUNDLED, "registered", None, "failed", BUNDLED, "install"),
        (BUNDLED, "registered", "1.3.1", "failed", BUNDLED, "install"),
        (None, "registered", None, "skipped", "not installed", None),
    ],
)
def test_which_chainermn_is_imported(machine, origin, finder, version, status, said, fix):
    machine.children(imports={"chainermn": origin, "chainer": None, "finder": finder})
    machine.packages(chainermn=version)
    found = machine.look("import chainermn")
    assert (found.status, said in found.found) == (status, True)
    assert (found.fix is None) if fix is None else (fix in found.fix)
    if status == "failed" and version == "2.0.0":
        machine.variables(CHAINERMN_USE_BUNDLED="1")
        found = machine.look("import chainermn")
        assert (found.status, found.fix) == ("warning", "unset CHAINERMN_USE_BUNDLED")


def test_a_chainer_that_cannot_be_imported_is_quoted(machine):
    machine.packages(chainer="7.8.1")
    machine.children(chainer=Unavailable("ModuleNotFoundError: No module named 'pkg_resources'"))
    found = machine.look("import chainer")
    assert (found.status, "pkg_resources" in found.found) == ("failed", True)
    assert "setuptools<82" in found.fix, "what `chainermn explain` knows of it"
    machine.variables(CHAINERMN_NO_COMPAT="1")
    assert "unset CHAINERMN_NO_COMPAT" in machine.look("import chainer").fix


# MPI

GCC = "Using built-in specs.\nTarget: x86_64-linux-gnu\nConfigured for Intel MPI, Open MPI\n"


@pytest.mark.parametrize(
    ("option", "printed", "found"),
    [
        # What MPICH 5.0.2's and Open MPI 5.0.11's wheels print.
        ("-v", f"mpicc for MPICH version 5.0.2\n{GCC}", "MPICH 5.0.2"),
        ("--showme:version", "mpicc: Open MPI 5.0.11 (Language: C)", "Open MPI 5.0.11"),
        ("-v", "mpicc for MVAPICH2 version 2.3.7", "MVAPICH 2.3.7"),
        ("-v", "mpiicc for the Intel(R) MPI Library 2021.10 for Linux*", "Intel MPI 2021.10"),
        ("-v", GCC, "an MPI that it doesn't name"),
        ("--help", "", "an MPI that it doesn't name"),
    ],
    ids=["MPICH", "Open MPI", "MVAPICH", "Intel MPI", "plain", "silent"],
)
def test_compilers_are_recognised(machine, option, printed, found):
    """Another option than the compiler's own for its version is an error of GCC."""
    script = f'case $1 in {option}) echo "{printed}";; *) echo "{GCC}"; exit 1;; esac'
    machine.program("mpicc", script)
    machine.mpi(launcher="MPICH")
    said = machine.look("mpicc")
    assert said.found.split(", of ")[1].split(", but")[0] == found
    assert said.status == ("warning" if found.startswith(("Open", "Intel")) else "ok")
    machine.mpi(launcher=found.rsplit(" ", 1)[0])
    assert machine.look("mpicc").status == "ok", "an mpiexec of the same MPI"


def test_an_mpiexec_of_another_mpi_is_named(machine):
    machine.mpi("MPICH", "Open MPI")
    found = machine.look("mpi match")
    assert found.status == "failed"
    assert "mpi4py loads MPICH but /opt/bin/mpiexec is Open MPI's" in found.found
    assert "PATH" in found.fix
    machine.mpi("MPICH", "MPICH")
    assert machine.look("mpi match").status == "ok"


def test_an_mpiexec_that_nobody_knows_is_quoted(machine):
    machine.mpi("MPICH", None)
    found = machine.look("mpiexec")
    assert (found.status, "what it says" in found.found) == ("warning", True)
    assert machine.look("mpi match").status == "skipped"


def test_an_mpi_that_does_not_load_gets_the_fix_that_explain_knows(machine):
    machine.mpi(Unavailable("RuntimeError: cannot load MPI library"))
    found = machine.look("mpi4py")
    assert (found.status, found.fix.split()[:3]) == ("failed", ["pip", "install", "mpich"])


def test_no_mpiexec_on_path_is_named(machine, tmp_path):
    machine.path(str(tmp_path))
    found = machine.look("mpiexec")
    assert (found.status, "no mpiexec on PATH" in found.found) == ("failed", True)
    assert found.fix.startswith("export PATH=") or "pip install mpich" in found.fix
    assert machine.look("mpicc").status == "skipped"
