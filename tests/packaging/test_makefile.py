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
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in [
        "packages/one/pyproject.toml",
        "hatch_build.py",
        "src/chainermn_facade/_table.py",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


# Of `make`, which may have started these tests.
NO_MAKE = {"MAKEFLAGS": "", "MAKELEVEL": "", "RED_STAGES": ""}


def make(folder, *arguments):
    return run("make", *arguments, cwd=folder, MPI="mpich", **NO_MAKE)


def would_do(folder, *arguments):
    """What a stage of `make test` would run, of making environments."""
    done = make(folder, "-n", "test-outside", *arguments)
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
        assert f"{python} -m pytest --full -m alone" in done.stdout
        for ranks in (1, 2, 3, 4):
            mpiexec = f"{repository}/.venv{mpi}/bin/mpiexec -n {ranks}"
            assert f"{mpiexec} {python} -m pytest --world" in done.stdout
    for version in ("3.11", "3.12", "3.13", "3.14", "3.15"):
        assert f"interpreters {version} -- " in done.stdout
    for words in (".venv-second", "tests/gpu/test_doubles_against_cupy.py"):
        assert words in done.stdout


STAGES = """
one:
\t@echo one is made; exit 1
two:
\t@echo two is made
both:
\t+@MAKE="$(MAKE)" {stages} one two
"""


def test_stages_all_run_and_the_last_lines_name_those_that_failed(tmp_path):
    stages = ROOT / "scripts" / "stages"
    (tmp_path / "Makefile").write_text(STAGES.format(stages=stages))
    done = run(stages, "both", "two", cwd=tmp_path, **NO_MAKE)
    assert done.returncode == 1
    made = [line for line in done.stdout.splitlines() if "is made" in line]
    assert made == ["one is made", "two is made", "two is made"]
    assert done.stderr.splitlines()[-2:] == ["Red: one", "Red: both"]
    done = run(stages, "two", cwd=tmp_path, **NO_MAKE)
    assert (done.returncode, "Red" in done.stderr) == (0, False)
