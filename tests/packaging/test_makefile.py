"""`make` builds its environment on the interpreter asked for, and anew only for another one."""

import os
import shutil
import sys

import pytest

from tests.support.jobs.commands import program, run
from tests.support.jobs.scripts import ROOT

NEWER = 2_000_000_000  # a time after that of every file copied


@pytest.fixture
def repository(tmp_path):
    """What the Makefile's set-up looks at, without an environment."""
    for file in (
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        ROOT / "build-constraints.txt",
    ):
        shutil.copy(file, tmp_path)
    for name in [
        "packages/one/pyproject.toml",
        "hatch_build.py",
        "src/chainermn_facade/_table.py",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def make(folder, *arguments):
    return run("make", *arguments, cwd=folder, MAKEFLAGS="", MAKELEVEL="", MPI="mpich")


def would_do(folder, *arguments):
    """What `make test` would run, of making environments."""
    done = make(folder, "-n", "test", *arguments)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if " -m venv " in line]


def make_environment(folder):
    assert (
        run(sys.executable, "-m", "venv", "--without-pip", folder / ".venv").returncode
        == 0
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
    other = program(
        repository / "other python", "#!/bin/sh\necho 3.99 /opt/other python\n"
    )
    make_environment(repository)
    (command,) = would_do(repository, f"PYTHON='{other}'")
    assert command.split() == [
        '"/opt/other',
        'python"',
        "-m",
        "venv",
        "--clear",
        ".venv",
    ]


def test_an_environment_whose_interpreter_is_gone_is_made_anew(repository):
    make_environment(repository)
    (repository / ".venv" / "bin" / "python").unlink()
    (command,) = would_do(repository, f"PYTHON={sys.executable}")
    assert "--clear" in command


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PYTHON=nowhere", "PYTHON=nowhere is no Python"),
        ("PYTHON={old}", "Python 3.11 or newer is needed, and {old} is 3.10"),
        ("MPI=mpi", "MPI is mpich or openmpi; got 'mpi'"),
        ("N=-1", "N, the number of ranks, must be a whole number, 1 or more; got '-1'"),
        ("N=", "1 or more; got ''"),
        ("EPOCHS=0", "EPOCHS must be a whole number, 1 or more; got '0'"),
        ("EPOCHS=two", "EPOCHS must be a whole number, 1 or more; got 'two'"),
    ],
)
def test_a_wrong_variable_is_named_before_anything_is_installed(
    repository, variable, said
):
    old = program(repository / "old", "#!/bin/sh\necho 3.10 /opt/old\n")
    variables = (
        variable.format(old=old),
        *([] if "PYTHON" in variable else [f"PYTHON={old}"]),
    )
    done = make(repository, "train", *variables)
    assert (done.returncode, said.format(old=old) in done.stderr) == (2, True), (
        done.stderr
    )
    assert not (repository / ".venv").exists()


def test_the_full_tier_is_all_there_is(repository):
    done = make(repository, "-n", "test-full", f"PYTHON={sys.executable}")
    assert done.returncode == 0, done.stderr
    for mpi in ("", "-openmpi"):
        python = f"{repository}/.venv{mpi}/bin/python"
        assert f"{python} -m tests.chaos" in done.stdout
        assert (
            f"{repository}/.venv{mpi}/bin/mpiexec -n $n {python} -m pytest --world"
            in done.stdout
        )
    assert done.stdout.count("for n in 1 2 3 4; do") == 2
    assert "for version in 3.11 3.15" in done.stdout
    for words in (
        "--full -m alone",
        ".venv-second",
        "tests/gpu/test_doubles_against_cupy.py",
    ):
        assert words in done.stdout
