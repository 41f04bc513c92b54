"""The `mpiexec` on PATH, or Slurm's `srun`, and its command line, which differs from MPI to MPI.

No shell ever reads a command line that is made here.
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
from chainermn_tools.threads import available_cores

HYDRA_VENDORS = ("MPICH", "MVAPICH", "Intel MPI")
# What `mpiexec --version` prints, most specific first: MVAPICH and Intel MPI build on
# Hydra too.
VENDOR_PATTERNS = (
    ("MVAPICH", r"mvapich"),
    ("Intel MPI", r"intel\(r\) mpi|intel mpi"),
    ("Open MPI", r"open ?mpi|\(open mpi\)|openrte|prrte"),
    ("MPICH", r"hydra|mpich"),
)
VERSION_TIMEOUT_SECONDS = 20.0


def find_mpiexec(program: str = "mpiexec") -> dict[str, Any]:
    """Return what `find_launcher` does; also raise Unavailable where its options aren't known."""
    found = find_launcher(VERSION_TIMEOUT_SECONDS, program)
    if found["vendor"] not in (*HYDRA_VENDORS, "Open MPI"):
        raise Unavailable(
            f"{found['path']} is of no known MPI (known are {', '.join(HYDRA_VENDORS)} and Open "
            "MPI); put another one first on PATH"
        )
    return found


def find_srun(library: str) -> dict[str, Any]:
    """Return Slurm's launcher, for ranks of this vendor's MPI; raise Unavailable without one."""
    plugin = "pmix" if library == "Open MPI" else "pmi2"
    return {"path": mpiexec_path("srun"), "vendor": "Slurm", "plugin": plugin}


def find_launcher(timeout: float, program: str = "mpiexec") -> dict[str, Any]:
    """Ask an mpiexec, by default that on PATH, for its version, for at most ``timeout`` seconds.

    Return ``path``, ``vendor``, ``version`` (both None where it doesn't say) and
    ``description``, the lines that it printed. Raise Unavailable if there is none, or
    it fails or hangs.
    """
    path = mpiexec_path(program)
    try:
        text = check_output([path, "--version"], timeout)
    except Unavailable as error:
        raise type(error)(f"{path} --version: {error}") from None
    return {
        "path": path,
        **parse_mpi_version(text),
        "description": text.rstrip().split("\n"),
    }


def mpiexec_path(program: str = "mpiexec") -> str:
    """Return where the mpiexec on PATH, or that one, is; raise Unavailable if there is none."""
    if path := shutil.which(program):
        return path
    if program != "mpiexec":
        raise Unavailable(f"there is no {program}")
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    remedy = (
        f"; {beside} exists: put its folder on PATH" if os.path.exists(beside) else ""
    )
    raise Unavailable(f"no mpiexec on PATH{remedy}")


def parse_mpi_version(text: str) -> dict[str, str | None]:
    """Return vendor and version in what `mpiexec --version` prints; None for what is missing."""
    vendor = next(
        (v for v, sign in VENDOR_PATTERNS if re.search(sign, text, re.IGNORECASE)), None
    )
    version = re.search(r"\b\d+\.\d+(?:\.\d+)*\w*", text)
    return {"vendor": vendor, "version": version.group() if version else None}


def mpiexec_command(
    launcher: Mapping[str, Any],
    ranks: int,
    # A Python script's path, or -m and a module, and its arguments.
    script: Sequence[str],
    *,
    flags: Sequence[str] = (),  # of Python
    # Names of variables that reach all hosts, beside `is_forwarded`'s.
    passed: Iterable[str] = (),
    # Ranks of each; None or empty for this one alone.
    hosts: Mapping[str, int] | None = None,
    prefix: bool = False,  # whether lines of output begin with their rank
    threads: int | None = None,  # of each rank; None where the user chose
    variables: Iterable[str] = (),  # names of the environment's
) -> list[str]:
    """Return the command line that starts a job, whose ranks report how they end.

    `find_mpiexec` and `find_srun` return such a launcher.
    """
    args = [str(launcher["path"])]
    listed = ",".join(f"{host}:{share}" for host, share in (hosts or {}).items())
    if launcher["vendor"] == "Slurm":
        # --kill-on-bad-exit would end ranks that still save and leave.
        args += [f"--mpi={launcher['plugin']}", "--wait=60", "--input=0"]
        # MPICH's addresses over UCX are longer than what PMI 2 takes; ranks hang as
        # they start.
        needs = launcher["plugin"] == "pmi2" and "MPIR_CVAR_CH4_NETMOD" not in variables
        args += [
            f"--export=ALL{',MPIR_CVAR_CH4_NETMOD=ofi' * needs}",
            "--cpu-bind=none",
        ]
        args += ["--overcommit", *["--label"] * prefix]
        named = ",".join(
            host for host, share in (hosts or {}).items() for _ in range(share)
        )
        args += [
            "--distribution=arbitrary",
            f"--nodes={len(hosts or ())}",
            f"--nodelist={named}",
        ]
    elif launcher["vendor"] == "Open MPI":
        old = str(launcher["version"]).split(".")[0] in ("1", "2", "3", "4")
        args += (["--tag-output"] if old else ["--output", "tag"]) if prefix else []
        args += ["--host", listed] if listed else []
        # Else it refuses more ranks than cores, and binds each rank to one core.
        oversubscribed = ranks > available_cores()["usable"] or listed
        args += ["--map-by", "slot:OVERSUBSCRIBE"] if oversubscribed else []
        args += ["--bind-to", "none"] if threads != 1 else []
        if listed:
            # To other hosts it passes on only these.
            names = {name for name in (*variables, JOB_VARIABLE) if is_forwarded(name)}
            args += [
                arg for name in sorted(names.union(passed)) for arg in ("-x", name)
            ]
    else:
        args += ["-prepend-rank"] if prefix else []
        args += ["-hosts", listed] if listed else []
    words = [rank.escape(word) for word in script]
    return [
        *args,
        "-n",
        str(ranks),
        sys.executable,
        *flags,
        "-m",
        rank.__name__,
        *words,
    ]
