"""Fresh environments to install the distributions into: made by uv, thrown away afterwards."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from uv import find_uv_bin

from tests.support.hosts.interpreters import (
    PYTHONS,
    found_combinations,
    found_interpreters,
)
from tests.support.jobs.scripts import ROOT

CONSTRAINTS = str(ROOT / "build-constraints.txt")
SECONDS = 300  # ends what hangs; a slow index takes tens of seconds


def run(*command, env=None, ok=True, **how):
    """Run a command to its end and return what it printed; `ok`: it must succeed."""
    ours = ("CHAINERMN_", "PYTHON", "VIRTUAL_ENV")  # would reach into the environment
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(ours)
    }
    settings = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1"}
    settings |= dict.fromkeys(
        ("UV_BUILD_CONSTRAINT", "PIP_BUILD_CONSTRAINT"), CONSTRAINTS
    )
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": SECONDS}
    variables = {**inherited, **settings, **(env or {})}
    words = [*map(str, command)]
    done = subprocess.run(words, env=variables, text=True, **how)
    assert (done.returncode == 0) is ok, (
        f"{command} returned {done.returncode}:\n{done.stdout}"
    )
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, and an empty folder to work in."""

    folder: Path

    @property
    def python(self):
        return self.folder / "bin" / "python"

    @property
    def site_packages(self):
        (found,) = self.folder.glob("lib/python3.*/site-packages")
        return found

    def install(self, *what):
        run(find_uv_bin(), "pip", "install", "-q", "--python", self.python, *what)

    def uninstall(self, *names):
        run(find_uv_bin(), "pip", "uninstall", "-q", "--python", self.python, *names)

    def check(self):
        """Every declared dependency of what is installed is installed too."""
        run(find_uv_bin(), "pip", "check", "--python", self.python)

    def run(self, *arguments, ranks=1, **how):
        """Run Python, on so many ranks, as the function `run` does."""
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        launcher = ()
        if ranks > 1:
            launcher = (self.folder / "bin" / "mpiexec", "-n", str(ranks))
        return run(*launcher, self.python, *arguments, cwd=work, **how)


def ends_first(values, ids):
    """Cases of them all: the first and the last value are in the first tiers."""
    marks = {value: pytest.mark.full for value in values[1:-1]}
    return [
        pytest.param(value, id=ids(value), marks=marks.get(value, ()))
        for value in values
    ]


def pytest_generate_tests(metafunc):
    """`combination` is each of them in turn, `python` each version found here."""
    if "combination" in metafunc.fixturenames:
        cases = ends_first(found_combinations(), "-".join)
        metafunc.parametrize("combination", cases, scope="session")
    if "python" in metafunc.fixturenames:
        cases = ends_first([v for v in PYTHONS if v in found_interpreters()], str)
        metafunc.parametrize("python", cases, scope="session")


def pytest_report_collectionfinish(items):
    """Say which Pythons are tested here: a newcomer's machine may have but one."""
    if not any(Path(__file__).parent in item.path.parents for item in items):
        return []
    found = ", ".join(sorted(found_interpreters()))
    return [
        f"packaging: tested on Python {found}, the ones found of {', '.join(PYTHONS)}"
    ]


Make = Callable[[Path], object]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Gives the folder of a name, filled by the first worker of pytest-xdist that asks for it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def find(name, make):
        folder = base / name
        made = base / f"{name}.made"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of one who failed
                make(folder)
                made.touch()
        return folder

    return find


@pytest.fixture(scope="session")
def wheels(made_once):
    """The five distributions, each built as sdist and from that as wheel: name to wheel."""

    def build(folder):
        how = ("-q", "--no-sources", "--all-packages", "-o", folder)
        run(find_uv_bin(), "build", *how, ROOT)

    folder = made_once("dist", build)
    assert len(list(folder.glob("*.tar.gz"))) == 5
    return {
        file.name.split("-")[0].replace("_", "-"): file for file in folder.glob("*.whl")
    }


@pytest.fixture(scope="session")
def find_links(wheels):
    """The arguments with which an installer finds the siblings."""
    return "--find-links", wheels["chainermn"].parent


@pytest.fixture(scope="session")
def environment_once(made_once):
    """Gives the environment of a name, which is filled once and not to be changed."""

    def find(
        name,
        fill,
        python=sys.executable,
    ):
        def make(folder):
            run(find_uv_bin(), "venv", "-q", "--python", python, folder)
            fill(Environment(folder))

        return Environment(made_once(name, make))

    return find


@pytest.fixture
def environment(
    tmp_path_factory,
):
    """Makes an environment: `environment()` or `environment(python)`, or a copy `of` one."""

    def make(python=sys.executable, of=None):
        folder = tmp_path_factory.mktemp("env")
        if of is None:
            run(find_uv_bin(), "venv", "-q", "--python", python, folder)
            return Environment(folder)
        # Links, which installers replace and don't write to: what takes long is done once.
        run("cp", "-al", f"{of.folder}/.", folder)
        shutil.rmtree(folder / "work", ignore_errors=True)  # of what has run there
        return Environment(folder)

    return make


@pytest.fixture(scope="session")
def everything(environment_once, wheels, find_links):
    """All five distributions as wheels, by name, Chainer, and an MPI; not to be changed."""
    version = wheels["chainermn"].name.split("-")[1]
    what = f"chainermn[mpich]=={version}", *find_links
    return environment_once("everything", lambda env: env.install(*what))


@pytest.fixture(scope="session")
def environment_on(environment_once, wheels):
    """Chainer, the finder and an MPI on one Python and NumPy; each made once, not to be changed."""

    def find(python, numpy):
        def fill(env):
            env.install(numpy, "chainer", wheels["chainermn-comm"], "mpich")
            env.uninstall("setuptools")

        name = f"{python}-{re.sub(r'[^.0-9]', '', numpy)}"
        return environment_once(name, fill, found_interpreters()[python])

    return find
