"""The supported Pythons: on this machine, and in Debian's unstable suite, which has the newest.

    python -m tests.support.hosts.interpreters 3.15 -- scripts/stages test test-ci PYTHON=

runs a command with one of them. Debian's suite is a folder that root makes once; its mounts end
with the command.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
OLDEST_NUMPY = "numpy==1.26.*"
WITH_OLDEST_NUMPY = ("3.11", "3.12")  # it has no wheel for later ones
# Debian's suite.
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".debian"
IN_DEBIAN = ("3.14", "3.15")
# What `make` needs, and what tests of several hosts need.
PACKAGES = [f"python{version}-venv" for version in IN_DEBIAN]
PACKAGES += ["make", "git", "g++", "procps"]
PACKAGES += ["iproute2", "openssh-client", "openssh-server"]
# Of this machine. Installers look for their settings, certificates and wheels there.
SHARED = ("/dev", "/proc", "/sys", "/run", "/tmp", "/home", "/root", "/opt", "/etc/ssl")
FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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


def why_not() -> str:
    """Say what is missing to make it, or nothing."""
    if os.geteuid() != 0:
        return "only root can make a folder of Debian's unstable suite"
    if shutil.which("debootstrap"):
        return ""
    return "debootstrap is not installed"


def make_folder():
    """Make Debian's folder unless it is there."""
    if (FOLDER / ".complete").exists():
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    packages = ",".join(PACKAGES)
    # It says what it does, line by line: no part of a test's output.
    subprocess.run(
        [
            "debootstrap",
            "--variant=minbase",
            f"--include={packages}",
            "sid",
            str(FOLDER),
        ],
        check=True,
        stdout=sys.stderr,
    )
    (FOLDER / ".complete").touch()


def run_in_debian(*command: str) -> int:
    """Run a command there, in the repository, and return its status."""
    make_folder()
    folder = shlex.quote(str(FOLDER))
    lines = ["set -e", f"mount --bind {folder} {folder}"]
    # The repository's folder comes last, as it may be below one of the others.
    for place in [*SHARED, *FILES, str(ROOT)]:
        if not Path(place).exists():
            continue
        target = FOLDER / place.lstrip("/")
        if place in FILES:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        else:
            target.mkdir(parents=True, exist_ok=True)
        source = shlex.quote(place)
        lines.append(f"mount --rbind {source} {shlex.quote(str(target))}")
    # Not `chroot` alone, which `nsenter` leaves: tests of several hosts enter their
    # hosts' mounts.
    inside = f"umount -l /mnt && cd {shlex.quote(str(ROOT))} && {shlex.join(command)}"
    lines += [
        f"cd {folder}",
        "pivot_root . mnt",
        f"exec chroot . sh -c {shlex.quote(inside)}",
    ]
    # Make's own settings of the caller, such as the jobs that it shares, are of no use
    # there.
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }
    own = [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "bash",
        "-c",
        "\n".join(lines),
    ]
    return subprocess.run(own, env=env | {"PATH": PATH}).returncode


def main(version: str, *command: str) -> int:
    """Run a command that ends with ``PYTHON=``, here or in Debian's unstable suite."""
    if version in found_interpreters():
        return subprocess.run(
            [*command[:-1], command[-1] + found_interpreters()[version]]
        ).returncode
    reason = why_not()
    if version not in IN_DEBIAN:
        reason = "Debian lacks it"
    if reason:
        sys.exit(f"Python {version} was not found, and {reason}")
    return run_in_debian(*command[:-1], f"{command[-1]}python{version}")


if __name__ == "__main__":
    wanted, _, *words = sys.argv[1:]
    sys.exit(main(wanted, *words))
