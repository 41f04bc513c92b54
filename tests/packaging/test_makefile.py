"""`make` names what is wrong with a variable, and makes all stages of a target."""

import shutil
import sys

import pytest

from tests.support.jobs.commands import program, run
from tests.support.jobs.scripts import ROOT

# Of `make`, which may have started these tests.
NO_MAKE = {"MAKEFLAGS": "", "MAKELEVEL": "", "RED_STAGES": ""}
OLD = """#!/bin/sh
exit 1
"""
STAGES = """
one:
\t@echo one is made; exit 1
two:
\t@echo two is made
both:
\t+@MAKE="$(MAKE)" {stages} one two
"""


@pytest.fixture
def repository(tmp_path):
    """What the Makefile looks at, without an environment."""
    for name in ("Makefile", "pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("packages/one/pyproject.toml", "src/chainermn_facade/_table.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    return tmp_path


def make(folder, *arguments):
    return run("make", *arguments, cwd=folder, MPI="mpich", **NO_MAKE)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PYTHON=nowhere", "PYTHON=nowhere must be Python 3.11 or newer"),
        ("PYTHON=./old", "PYTHON=./old must be Python 3.11 or newer"),
        ("MPI=mpi", "MPI is mpich or openmpi; got 'mpi'"),
        ("N=-1", "whole numbers, 1 or more; got '-1' and '20'"),
        ("N=", "whole numbers, 1 or more; got '' and '20'"),
        ("EPOCHS=0", "whole numbers, 1 or more; got '2' and '0'"),
    ],
)
def test_a_wrong_variable_is_named_before_anything_is_installed(
    repository, variable, said
):
    program(repository / "old", OLD)
    done = make(repository, "train", variable)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr, done.stderr
    assert not list(repository.glob(".venv*"))


def test_each_interpreter_and_mpi_has_an_environment_of_its_own():
    options = f"PYTHON={sys.executable}3.99", "MPI=openmpi"
    done = make(ROOT, "-n", "test-outside", *options)
    name = f".venv-openmpi-{sys.executable.rpartition('/')[2]}3.99"
    assert f" -m venv --clear {name}\n" in done.stdout
    assert f"{ROOT}/{name}/bin/python -m pytest" in done.stdout


def test_stages_all_run_and_the_last_lines_name_those_that_failed(tmp_path):
    stages = ROOT / "scripts" / "stages"
    (tmp_path / "Makefile").write_text(STAGES.format(stages=stages))
    done = run(stages, "both", "two", cwd=tmp_path, **NO_MAKE)
    assert done.returncode == 1
    made = [line for line in done.stdout.splitlines() if "is made" in line]
    assert made == ["one is made", "two is made", "two is made"]
    assert done.stderr.splitlines()[-2:] == ["Red: one", "Red: both"]
    done = run(stages, "two", cwd=tmp_path, **NO_MAKE)
    assert done.returncode == 0
    assert "Red" not in done.stderr
