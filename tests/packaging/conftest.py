"""Fresh environments to install the distributions into: made by uv, thrown away afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from uv import find_uv_bin

from tests.support.interpreters import PYTHONS, found_interpreters

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # ends what hangs; a slow index takes tens of seconds

Run = Callable[..., subprocess.CompletedProcess[str]]


def run(*command: str | Path, env: dict[str, str] | None = None, ok: bool = True, **how) -> str:
    """Run a command to its end and return what it printed; `ok`: it must succeed."""
    ours = ("CHAINERMN_", "PYTHON", "VIRTUAL_ENV")  # would reach into the environment
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    settings = {
        "UV_BUILD_CONSTRAINT": str(ROOT / "build-constraints.txt"),
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_NO_PROGRESS": "1",
        "PIP_BUILD_CONSTRAINT": str(ROOT / "build-constraints.txt"),
    }
    done = subprocess.run(
        [str(part) for part in command],
        env={**inherited, **settings, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
        **how,
    )
    words = " ".join(map(str, command))
    assert (done.returncode == 0) is ok, f"{words}\nreturned {done.returncode}:\n{done.stdout}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment of its own, and an empty folder to work in."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3.*/site-packages")
        return found

    def install(self, *what: str | Path) -> None:
        run(find_uv_bin(), "pip", "install", "-q", "--python", self.python, *what)

    def uninstall(self, *names: str) -> None:
        run(find_uv_bin(), "pip", "uninstall", "-q", "--python", self.python, *names)

    def check(self) -> None:
        """Every declared dependency of what is installed is installed too."""
        run(find_uv_bin(), "pip", "check", "--python", self.python)

    def run(
        self, *arguments: str | Path, env: dict[str, str] | None = None, ok: bool = True
    ) -> str:
        work = self.folder / "work"
        work.mkdir(exist_ok=True)
        return run(self.python, *arguments, env=env, ok=ok, cwd=work)


def make_environment(folder: Path, python: str | Path = sys.executable) -> Environment:
    run(find_uv_bin(), "venv", "-q", "--python", python, folder)
    return Environment(folder)


@pytest.fixture(scope="session")
def interpreters() -> dict[str, str]:
    """Version (`3.11`) to interpreter, of the supported ones on this machine."""
    return found_interpreters()


def found_combinations() -> list[tuple[str, str]]:
    """Each Python with the oldest and the newest NumPy that has a wheel for it, oldest first."""
    return [
        (python, numpy)
        for python in PYTHONS
        for numpy in ("numpy==1.26.*", "numpy>=2")
        if python in found_interpreters() and (python, numpy) != ("3.13", "numpy==1.26.*")
    ]


@pytest.fixture(scope="session")
def combinations() -> list[tuple[str, str]]:
    return found_combinations()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`combination` is each of them in turn, `python` each version found here."""
    if "combination" in metafunc.fixturenames:
        names = [f"{python}-{numpy}" for python, numpy in found_combinations()]
        metafunc.parametrize("combination", found_combinations(), ids=names, scope="module")
    if "python" in metafunc.fixturenames:
        metafunc.parametrize("python", sorted(found_interpreters()), scope="module")


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """Say which Pythons are tested here: a newcomer's machine may have but one."""
    if not any(Path(__file__).parent in item.path.parents for item in items):
        return []
    found = found_interpreters()
    missing = [version for version in PYTHONS if version not in found]
    line = f"packaging: tested on Python {', '.join(sorted(found))}"
    if missing:
        line += f"; not on {', '.join(missing)}, which are not on this machine"
    return [line]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The five distributions, each built as sdist and from that as wheel: name to wheel."""
    folder = tmp_path_factory.mktemp("dist")
    built = {}
    for source in [*sorted((ROOT / "packages").iterdir()), ROOT]:
        run(find_uv_bin(), "build", "-q", "--no-sources", "-o", folder / source.name, source)
        (wheel,) = (folder / source.name).glob("*.whl")
        (_,) = (folder / source.name).glob("*.tar.gz")
        shutil.move(wheel, folder)
        built[wheel.name.split("-")[0].replace("_", "-")] = folder / wheel.name
    return built


@pytest.fixture(scope="session")
def find_links(wheels: dict[str, Path]) -> tuple[str | Path, ...]:
    """The arguments with which an installer finds the siblings."""
    return "--find-links", wheels["chainermn"].parent


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Environment]:
    """Make an environment: `environment()` or `environment(python)`."""

    def make(python: str | Path = sys.executable) -> Environment:
        return make_environment(tmp_path_factory.mktemp("env"), python)

    return make


@pytest.fixture(scope="session")
def everything(environment, wheels, find_links) -> Environment:
    """All five distributions as wheels, Chainer, and an MPI."""
    env = environment()
    env.install(*wheels.values(), *find_links, "mpich")
    return env
