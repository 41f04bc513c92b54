"""`make` builds its environment on the interpreter asked for, and anew only for another one."""

import os
import shutil
import sys

import pytest

from tests.support.commands import program, run
from tests.support.scripts import ROOT

NEWER = 2_000_000_000  # a time after that of every file copied


@pytest.fixture
def repository(tmp_path):
    """What the Makefile's set-up looks at, without an environment."""
    for file in (ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "build-constraints.txt"):
        shutil.copy(file, tmp_path)
    (tmp_path / "packages" / "one").mkdir(parents=True)
    (tmp_path / "packages" / "one" / "pyproject.toml").touch()
    return tmp_path


def make(folder, *arguments):
    return run("make", *arguments, cwd=folder, MAKEFLAGS="", MAKELEVEL="")


def would_do(folder, *arguments):
    """What `make test` would run, of making environments."""
    done = make(folder, "-n", "test", *arguments)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if " -m venv " in line]


def make_environment(folder):
    assert run(sys.executable, "-m", "venv", "--without-pip", folder / ".venv").returncode == 0
    (folder / ".venv" / ".ready").touch()
    os.utime(folder / ".venv" / ".ready", (NEWER, NEWER))


def test_the_environment_is_made_once(repository):
    mine = f"PYTHON={sys.executable}"
    (command,) = would_do(repository, mine)
    assert os.path.realpath(sys._base_executable) in command  # type: ignore[attr-defined]
    make_environment(repository)
    assert would_do(repository, mine) == []
    # Chosen by another name, or from within the environment itself.
    assert would_do(repository, f"PYTHON={repository}/.venv/bin/python") == []
    os.utime(repository / "pyproject.toml", (NEWER + 1, NEWER + 1))
    (command,) = would_do(repository, mine)
    assert "--clear" not in command


def test_another_interpreter_makes_it_anew(repository):
    other = program(repository / "other python", "#!/bin/sh\necho 3.99 /opt/other python\n")
    make_environment(repository)
    (command,) = would_do(repository, f"PYTHON='{other}'")
    assert command.split() == ['"/opt/other', 'python"', "-m", "venv", "--clear", ".venv"]


def test_an_environment_whose_interpreter_is_gone_is_made_anew(repository):
    make_environment(repository)
    (repository / ".venv" / "bin" / "python").unlink()
    (command,) = would_do(repository, f"PYTHON={sys.executable}")
    assert "--clear" in command


def test_an_interpreter_that_is_not_there_is_named(repository):
    done = make(repository, "-n", "test", "PYTHON=nowhere")
    assert done.returncode != 0
    assert "PYTHON=nowhere is no Python" in done.stderr


def test_a_number_of_ranks_that_is_none_is_refused(repository):
    """Before `mpiexec` gets it, which takes what it likes from it."""
    make_environment(repository)
    for ranks in ("-1", "two"):
        done = make(repository, "train", f"N={ranks}", f"PYTHON={sys.executable}")
        assert done.returncode == 2
        assert f"N is the number of ranks, 1 or more; got '{ranks}'" in done.stderr
