"""The supported Pythons on this machine.

    python -m tests.support.hosts.interpreters 3.15 -- scripts/stages test test-ci PYTHON=

runs a command with one of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.hosts import unstable

PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
OLDEST_NUMPY = "numpy==1.26.*"
WITH_OLDEST_NUMPY = ("3.11", "3.12")  # it has no wheel for later ones


@cache
def found_interpreters() -> dict[str, str]:
    """Version to interpreter: this one, pyenv's, and those on PATH."""
    found = {"%d.%d" % sys.version_info[:2]: sys.executable}  # noqa: UP031
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        candidates = sorted(str(path) for path in pyenv.glob(f"{version}.*/bin/python"))
        candidates += filter(None, [shutil.which(f"python{version}")])
        for candidate in candidates:
            if version not in found and _runs(candidate):
                found[version] = candidate
    return found


def found_combinations() -> list[tuple[str, str]]:
    """Each Python with the oldest and the newest NumPy that has a wheel for it, oldest first."""
    return [
        (python, numpy)
        for python in PYTHONS
        for numpy in (OLDEST_NUMPY, "numpy>=2")
        if python in found_interpreters()
        and (numpy != OLDEST_NUMPY or python in WITH_OLDEST_NUMPY)
    ]


def _runs(python: str) -> bool:
    """Whether it does: a shim of pyenv's may stand on PATH for a version not chosen."""
    try:
        return (
            subprocess.run(
                [python, "-c", ""], capture_output=True, timeout=60
            ).returncode
            == 0
        )
    except OSError:
        return False


def main(version: str, *command: str) -> int:
    """Run a command that ends with ``PYTHON=``, here or in Debian's unstable suite."""
    if version in found_interpreters():
        return subprocess.run(
            [*command[:-1], command[-1] + found_interpreters()[version]]
        ).returncode
    if version not in unstable.PYTHONS or unstable.why_not():
        sys.exit(
            f"Python {version} was not found, and {unstable.why_not() or 'Debian lacks it'}"
        )
    return unstable.run(*command[:-1], f"{command[-1]}python{version}")


if __name__ == "__main__":
    wanted, _, *words = sys.argv[1:]
    sys.exit(main(wanted, *words))
