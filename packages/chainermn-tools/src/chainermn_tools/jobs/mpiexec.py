"""The `mpiexec` on PATH, and its command line, which differs from MPI to MPI.

No shell reads a command line that is made here.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from _chainermn_events import JOB_VARIABLE
from chainermn_tools import rank
from chainermn_tools.jobs.process import Unavailable, check_output
from chainermn_tools.jobs.variables import is_forwarded

# Words that `mpiexec --version` prints, the most specific first: MVAPICH and Intel MPI
# build on Hydra, too.
VENDOR_PATTERNS = (
    ("MVAPICH", r"mvapich"),
    ("Intel MPI", r"intel\(r\) mpi|intel mpi"),
    ("Open MPI", r"open ?mpi|\(open mpi\)|openrte|prrte"),
    ("MPICH", r"hydra|mpich"),
)
VERSION_TIMEOUT_SECONDS = 20.0


def find_mpiexec(program: str = "mpiexec") -> dict[str, Any]:
    """Do what `find_launcher` does; also raise Unavailable if the options aren't known."""
    found = find_launcher(VERSION_TIMEOUT_SECONDS, program)
    if found["vendor"] is None:
        raise Unavailable(
            f"{found['path']} is of no known MPI; use an mpiexec of MPICH, MVAPICH, "
            "Intel MPI or Open MPI"
        )
    return found


def find_launcher(timeout: float, program: str = "mpiexec") -> dict[str, Any]:
    """Ask an mpiexec, by default that on PATH, for its version, for at most ``timeout`` seconds.

    Return ``path``, ``vendor``, ``version`` (both None if unknown) and ``description``,
    the lines that it printed. Raise Unavailable if there is none, or it fails or hangs.
    """
    path = _path_of(program)
    try:
        text = check_output([path, "--version"], timeout)
    except Unavailable as error:
        raise type(error)(f"{path} --version: {error}") from None
    return {
        "path": path,
        **parse_mpi_version(text),
        "description": text.rstrip().split("\n"),
    }


def _path_of(program: str) -> str:
    path = shutil.which(program)
    if path is not None:
        return path
    if program != "mpiexec":
        raise Unavailable(f"there is no {program}")
    message = "no mpiexec on PATH"
    beside = os.path.join(os.path.dirname(sys.executable), program)
    if os.path.exists(beside):
        message = f"{message}; {beside} exists: put its folder on PATH"
    raise Unavailable(message)


def parse_mpi_version(text: str) -> dict[str, str | None]:
    """Return the vendor and version that `mpiexec --version` prints, each None if it is missing."""
    found: dict[str, str | None] = {"vendor": None, "version": None}
    for vendor, sign in VENDOR_PATTERNS:
        if found["vendor"] is None and re.search(sign, text, re.IGNORECASE):
            found["vendor"] = vendor
    version = re.search(r"\b\d+\.\d+(?:\.\d+)*\w*", text)
    if version is not None:
        found["version"] = version.group()
    return found


def mpiexec_command(
    launcher: Mapping[str, Any],
    ranks: int,
    # A Python script's path, or -m and a module, and its arguments.
    script: Sequence[str],
    *,
    flags: Sequence[str] = (),  # of Python
    # Names of variables that reach all hosts, beside `is_forwarded`'s.
    passed: Iterable[str] = (),
    # The ranks of each host; None or empty for this host alone.
    hosts: Mapping[str, int] | None = None,
    prefix: bool = False,  # whether lines of output begin with their rank
    threads: int | None = None,  # BLAS threads of each rank; None if hosts may differ
    variables: Iterable[str] = (),  # names of the environment's variables
) -> list[str]:
    """Return the command line of a job whose ranks report how they end.

    `find_mpiexec` returns the ``launcher``.
    """
    args = [str(launcher["path"])]
    listed = ",".join(f"{host}:{share}" for host, share in (hosts or {}).items())
    if launcher["vendor"] == "Open MPI":
        # Otherwise Open MPI refuses more ranks than cores, and binds each rank to one
        # core.
        args += ["--map-by", "slot:OVERSUBSCRIBE"]
        if threads != 1:
            args += ["--bind-to", "none"]
        if prefix:
            args += ["--output", "tag"]
        if listed:
            args += ["--host", listed]
            # Open MPI passes only these on to other hosts.
            names = {*filter(is_forwarded, variables), JOB_VARIABLE, *passed}
            for name in sorted(names):
                args += ["-x", name]
    else:
        if prefix:
            args.append("-prepend-rank")
        if listed:
            args += ["-hosts", listed]
    args += ["-n", str(ranks), sys.executable, *flags, "-m", rank.__name__]
    return args + [rank.escape(word) for word in script]
