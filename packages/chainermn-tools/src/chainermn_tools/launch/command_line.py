"""The command line of mpiexec, which differs from MPI to MPI. No shell ever reads it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from chainermn_tools.environment import mpi, probe
from chainermn_tools.environment.machine import cores

RANK_MODULE = "chainermn_tools.launch.rank"
# A rank's environment says by which launch it was started.
LAUNCH_VARIABLE = "CHAINERMN_LAUNCH"
# With one of these a user chooses the number of threads.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
# To other hosts Open MPI takes only what it is told; MPICH takes everything.
PASSED = re.compile(
    r"CHAINER|CUDA_|CUPY_|MPI4PY_|NCCL_|UCX_|OMP_|OPENBLAS_|MKL_|BLIS_|GOTO_"
    r"|(?:LD_LIBRARY_PATH|PYTHONPATH)$"
)
HYDRA = ("MPICH", "MVAPICH", "Intel MPI")
# mpiexec takes an argument that is a colon for the end of one program and the start of another.
COLON = re.compile(r"\\*:")
ASK_SECONDS = 20.0


def find_mpiexec() -> dict[str, Any]:
    """The mpiexec to use: ``path``, ``vendor`` and ``version``.

    Raises:
        ValueError: there is none, or none whose options are known.
    """
    try:
        found = mpi.launcher(ASK_SECONDS)
    except probe.Unavailable as problem:
        raise ValueError(str(problem)) from None
    if found["vendor"] not in (*HYDRA, "Open MPI"):
        raise ValueError(
            f"{found['path']} is of no known MPI (known are {', '.join(HYDRA)} and Open MPI); "
            "put another one first on PATH"
        )
    return found


def command_line(
    mpiexec: Mapping[str, Any],
    ranks: int,
    hosts: Mapping[str, int],
    prefix: bool,
    threads: int | None,
    names: Sequence[str],
    script: str,
    arguments: Sequence[str],
) -> list[str]:
    """The words of the command that starts a job.

    Args:
        mpiexec: as :func:`find_mpiexec` returns it.
        ranks: how many.
        hosts: how many of them on each host; empty for this one alone.
        prefix: whether lines of output begin with their rank.
        threads: how many each rank computes with; None where the user chose.
        names: of the environment's variables.
        script: that each rank runs.
        arguments: of the script.
    """
    words = [str(mpiexec["path"])]
    listed = ",".join(f"{host}:{share}" for host, share in hosts.items())
    if mpiexec["vendor"] == "Open MPI":
        old = str(mpiexec["version"]).split(".")[0] in ("1", "2", "3", "4")
        words += (["--tag-output"] if old else ["--output", "tag"]) if prefix else []
        words += ["--host", listed] if listed else []
        # Else it refuses more ranks than cores, and binds each rank to one core.
        words += ["--map-by", "slot:OVERSUBSCRIBE"] if ranks > cores()["usable"] or listed else []
        words += ["--bind-to", "none"] if threads != 1 else []
        if listed:
            words += [word for name in sorted(names) if PASSED.match(name) for word in ("-x", name)]
    else:
        words += ["-prepend-rank"] if prefix else []
        words += ["-hosts", listed] if listed else []
    words += ["-n", str(ranks), sys.executable, "-m", RANK_MODULE]
    return [*words, *(escape(word) for word in (script, *arguments))]


def escape(word: str) -> str:
    """The word as mpiexec may see it; :func:`unescape` undoes it."""
    return f"\\{word}" if COLON.fullmatch(word) else word


def unescape(word: str) -> str:
    """What :func:`escape` was given."""
    return word[1:] if COLON.fullmatch(word) else word


def threads_for(ranks: int, hosts: Mapping[str, int]) -> int | None:
    """How many threads each rank should compute with; None where the user chose.

    The cores are those of this host; others are taken to have as many.
    """
    if any(os.environ.get(name, "").strip() for name in THREAD_VARIABLES):
        return None
    return max(1, int(cores()["usable"]) // max(hosts.values(), default=ranks))
