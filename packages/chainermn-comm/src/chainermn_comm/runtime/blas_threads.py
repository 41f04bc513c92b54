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

_largest_size = 1  # that a communicator had so far for which threads were counted
_set_by_us: dict[str, str] = {}  # variables that we set, so as not to take them for the user's


@dataclass(frozen=True)
class RankResources:
    """What one rank may use of its node.

    Attributes:
        cores: numbers of the cores on which it may run.
        cgroup: the one that limits it most, and the cores' worth of time that its processes
            get together; None for no limit.
        threads: of its BLAS, the most of any that is loaded.
        is_user_set: whether its user set the number.
    """

    cores: frozenset[int]
    cgroup: tuple[str, float] | None
    threads: int
    is_user_set: bool


def blas_payload(ranks: int) -> bytes:
    """Return what a rank adds to the handshake that creates a communicator of so many ranks.

    Unless all ranks' payloads are empty, all call :func:`limit_blas_threads`.
    """
    return b"count" if ranks > _largest_size else b""


def limit_blas_threads(mpi_comm: MPI.Intracomm) -> None:
    """Limit BLAS threads where the ranks on a node have more than the node has cores (collective).

    Nothing is done on a node with one rank, nor where the user set a number in the environment.
    The limit stays until the process ends. Rank 0 says so, once: ranks that are limited already
    aren't limited again.

    Args:
        mpi_comm: the ranks that will compute at the same time.
    """
    from mpi4py import MPI

    global _largest_size
    _largest_size = max(_largest_size, mpi_comm.size)
    node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        ranks = node.allgather(_own_resources())
    finally:
        node.Free()
    threads = allowed_threads(ranks)
    if threads is not None:
        _limit(threads)
    texts = mpi_comm.gather(
        threads and f"{threads} for each of {len(ranks)} ranks on {usable_cores(ranks)} cores"
    )
    if texts and any(texts):
        print(
            f"ChainerMN: limited BLAS threads to {'; '.join(dict.fromkeys(filter(None, texts)))} "
            "(set OMP_NUM_THREADS to choose yourself)",
            file=sys.stderr,
            flush=True,
        )


def allowed_threads(ranks: Sequence[RankResources]) -> int | None:
    """Return the BLAS threads that each rank of a node gets; None to leave them as they are."""
    cores = usable_cores(ranks)
    threads = max(1, cores // len(ranks))
    if (
        len(ranks) == 1
        or any(rank.is_user_set for rank in ranks)
        or sum(rank.threads for rank in ranks) <= cores
        or all(rank.threads <= threads for rank in ranks)
    ):
        return None
    return threads


def usable_cores(ranks: Sequence[RankResources]) -> int:
    """Return how many cores the ranks of a node can keep busy together, at least 1."""
    cores = len(frozenset[int]().union(*(rank.cores for rank in ranks)))
    cgroups = [rank.cgroup for rank in ranks]
    limited = [cgroup for cgroup in cgroups if cgroup is not None]
    if len(limited) == len(cgroups):  # else a rank is free to use them all
        cores = min(cores, int(sum(dict(limited).values())))
    return max(1, cores)


def tightest_cgroup(
    membership: str | None = None, root: Path = _chainermn_cgroups.ROOT
) -> tuple[str, float] | None:
    """Return the cgroup with the least CPU time above this process, and that time in cores.

    Args:
        membership: text of ``/proc/self/cgroup``; read from there when None.
        root: where cgroups are mounted.
    """
    folders = _chainermn_cgroups.folders("cpu", membership, root)
    quotas = ((str(folder), _chainermn_cgroups.cpu_quota(folder)) for folder in folders)
    found = [(name, quota) for name, quota in quotas if quota is not None]
    return min(found, key=lambda cgroup: cgroup[1], default=None)


def _own_resources() -> RankResources:
    is_set = any(
        os.environ.get(name, "").strip() not in ("", _set_by_us.get(name))
        for name in USERS_VARIABLES
    )
    cores = frozenset(os.sched_getaffinity(0))
    return RankResources(cores, tightest_cgroup(), 0 if is_set else _blas_threads(), is_set)


def _blas_threads() -> int:
    import threadpoolctl

    found = threadpoolctl.threadpool_info()
    return max((one["num_threads"] for one in found if one["user_api"] == "blas"), default=1)


def _limit(threads: int) -> None:
    import threadpoolctl

    threadpoolctl.threadpool_limits(threads, user_api="blas")
    for name in LATE_VARIABLES:
        os.environ[name] = _set_by_us[name] = str(threads)
