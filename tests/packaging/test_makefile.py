"""`make` builds its environment on the interpreter asked for, and anew only for another one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEWER = 2_000_000_000  # a time after that of every file copied


@pytest.fixture
def repository(tmp_path):
    """What the Makefile's set-up looks at, without an environment."""
    for file in (ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "build-constraints.txt"):
        shutil.copy(file, tmp_path)
    (tmp_path / "packages" / "one").mkdir(parents=True)
    (tmp_path / "packages" / "one" / "pyproject.toml").touch()
    return tmp_path


def would_do(folder, *arguments, ok=True):
    """What `make test` would run, of making environments."""
    inherited = {name: x for name, x in os.environ.items() if not name.startswith(("MAKE", "MFL"))}
    done = subprocess.run(
        ["make", "-n", "test", *arguments],
        cwd=folder,
        env=inherited,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) is ok, done.stderr
    if not ok:
        return done.stderr
    return [line for line in done.stdout.splitlines() if " -m venv " in line]


def make_environment(folder):
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True, timeout=120
    )
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
    other = repository / "other python"
    other.write_text("#!/bin/sh\necho 3.99 /opt/other python\n")
    other.chmod(0o755)
    make_environment(repository)
    (command,) = would_do(repository, f"PYTHON='{other}'")
    assert command.split() == ['"/opt/other', 'python"', "-m", "venv", "--clear", ".venv"]


def test_an_environment_whose_interpreter_is_gone_is_made_anew(repository):
    make_environment(repository)
    (repository / ".venv" / "bin" / "python").unlink()
    (command,) = would_do(repository, f"PYTHON={sys.executable}")
    assert "--clear" in command


def test_an_interpreter_that_is_not_there_is_named(repository):
    assert "PYTHON=nowhere is no Python" in would_do(repository, "PYTHON=nowhere", ok=False)


@pytest.mark.parametrize("ranks", ["-1", "two"])
def test_a_number_of_ranks_that_is_none_is_refused(repository, ranks):
    """Before `mpiexec` gets it, which takes what it likes from it."""
    make_environment(repository)
    command = ["make", "train", f"N={ranks}", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert f"N is the number of ranks, 1 or more; got '{ranks}'" in done.stderr
