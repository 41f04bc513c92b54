"""The supported Pythons on this machine; as a program, prints one that is not running it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

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
        if python in found_interpreters() and (numpy != OLDEST_NUMPY or python in WITH_OLDEST_NUMPY)
    ]


def _runs(python: str) -> bool:
    """Whether it does: a shim of pyenv's may stand on PATH for a version not chosen."""
    try:
        return subprocess.run([python, "-c", ""], capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


if __name__ == "__main__":
    others = [path for path in found_interpreters().values() if path != sys.executable]
    print(others[-1] if others else "")
