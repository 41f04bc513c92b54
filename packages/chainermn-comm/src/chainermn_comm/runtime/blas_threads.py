"""Keeps the ranks of a node from starting more BLAS threads than it has cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import _chainermn_cgroups

if TYPE_CHECKING:
    from mpi4py import MPI

# With one of these a user chooses the number of threads, and nothing is changed.
USERS_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
)
# threadpoolctl reaches what is loaded. Libraries loaded later (SciPy brings its own BLAS) and
# child processes read these; OMP_NUM_THREADS isn't among them, since it rules more than BLAS.
LATE_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")

_most_ranks = 1  # that a communicator had so far for which threads were counted
_set_here: dict[str, str] = {}  # variables that we set, so as not to take them for the user's


@dataclass(frozen=True)
class Share:
    """What one rank may use of its node.

    Attributes:
        cores: numbers of the cores on which it may run.
        group: the cgroup that limits it most, and the cores' worth of time that its processes
            get together; None for no limit.
        threads: of its BLAS, the most of any that is loaded.
        chosen: whether its user set the number.
    """

    cores: frozenset[int]
    group: tuple[str, float] | None
    threads: int
    chosen: bool


def note(ranks: int) -> bytes:
    """What a rank tells the others before a communicator of so many ranks is made.

    Unless all ranks' notes are empty, all call :func:`limit_blas_threads`.
    """
    return b"count" if ranks > _most_ranks else b""


def limit_blas_threads(mpi_comm: MPI.Intracomm) -> None:
    """Limit BLAS threads where the ranks on a node have more than the node has cores (collective).

    Nothing is done on a node with one rank, nor where the user set a number in the environment.
    The limit stays until the process ends. Rank 0 says so, once: ranks that are limited already
    aren't limited again.

    Args:
        mpi_comm: the ranks that will compute at the same time.
    """
    from mpi4py import MPI

    global _most_ranks
    _most_ranks = max(_most_ranks, mpi_comm.size)
    node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        shares = node.allgather(_own_share())
    finally:
        node.Free()
    threads = allowed_threads(shares)
    if threads is not None:
        _limit(threads)
    said = mpi_comm.gather(
        threads and f"{threads} for each of {len(shares)} ranks on {usable_cores(shares)} cores"
    )
    if said and any(said):
        print(
            f"ChainerMN: limited BLAS threads to {'; '.join(dict.fromkeys(filter(None, said)))} "
            "(set OMP_NUM_THREADS to choose yourself)",
            file=sys.stderr,
            flush=True,
        )


def allowed_threads(shares: Sequence[Share]) -> int | None:
    """The BLAS threads that each rank of a node gets; None to leave them as they are."""
    cores = usable_cores(shares)
    threads = max(1, cores // len(shares))
    if (
        len(shares) == 1
        or any(share.chosen for share in shares)
        or sum(share.threads for share in shares) <= cores
        or all(share.threads <= threads for share in shares)
    ):
        return None
    return threads


def usable_cores(shares: Sequence[Share]) -> int:
    """How many cores the ranks of a node can keep busy together, at least 1."""
    cores = len(frozenset[int]().union(*(share.cores for share in shares)))
    groups = [share.group for share in shares]
    limited = [group for group in groups if group is not None]
    if len(limited) == len(groups):  # else a rank is free to use them all
        cores = min(cores, int(sum(dict(limited).values())))
    return max(1, cores)


def tightest_group(
    membership: str | None = None, root: Path = _chainermn_cgroups.ROOT
) -> tuple[str, float] | None:
    """The cgroup with the least CPU time above this process, and that time in cores.

    Args:
        membership: text of ``/proc/self/cgroup``; read from there when None.
        root: where cgroups are mounted.
    """
    folders = _chainermn_cgroups.folders("cpu", membership, root)
    quotas = ((str(folder), _chainermn_cgroups.cpu_quota(folder)) for folder in folders)
    found = [(name, quota) for name, quota in quotas if quota is not None]
    return min(found, key=lambda group: group[1], default=None)


def _own_share() -> Share:
    chosen = any(
        os.environ.get(name, "").strip() not in ("", _set_here.get(name))
        for name in USERS_VARIABLES
    )
    cores = frozenset(os.sched_getaffinity(0))
    return Share(cores, tightest_group(), 0 if chosen else _blas_threads(), chosen)


def _blas_threads() -> int:
    import threadpoolctl

    found = threadpoolctl.threadpool_info()
    return max((one["num_threads"] for one in found if one["user_api"] == "blas"), default=1)


def _limit(threads: int) -> None:
    import threadpoolctl

    threadpoolctl.threadpool_limits(threads, user_api="blas")
    for name in LATE_VARIABLES:
        os.environ[name] = _set_here[name] = str(threads)
