"""Debian's unstable suite, which has the newest Pythons, in a folder: made once, by root.

    python -m tests.support.hosts.unstable make test PYTHON=python3.15

runs a command there, in the repository. The folder's mounts end with the command.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".debian"
PYTHONS = ("3.14", "3.15")
# What `make` needs, and what tests of several hosts need.
PACKAGES = [f"python{version}-venv" for version in PYTHONS]
PACKAGES += ["make", "git", "g++", "procps"]
PACKAGES += ["iproute2", "openssh-client", "openssh-server"]
# Of this machine. Installers look for their settings, certificates and wheels there.
SHARED = ("/dev", "/proc", "/sys", "/run", "/tmp", "/home", "/root", "/opt", "/etc/ssl")
FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str:
    """Say what is missing to make it, or nothing."""
    if os.geteuid() != 0:
        return "only root can make a folder of Debian's unstable suite"
    return "" if shutil.which("debootstrap") else "debootstrap is not installed"


def make() -> None:
    """Make the folder unless it is there."""
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


def run(*command: str) -> int:
    """Run a command there, in the repository, and return its status."""
    make()
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
        lines.append(f"mount --rbind {shlex.quote(place)} {shlex.quote(str(target))}")
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


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    sys.exit(run(*sys.argv[1:]))
