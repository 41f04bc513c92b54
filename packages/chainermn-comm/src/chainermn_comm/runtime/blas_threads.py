"""Keeps the ranks of a node from starting more BLAS threads than it has cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import threadpoolctl

from _chainermn_limits import chosen_thread_variables, threads_per_rank, tightest_cgroup

if TYPE_CHECKING:
    from mpi4py import MPI

# threadpoolctl limits the libraries that are loaded. Libraries that are loaded later (SciPy
# brings a BLAS of its own) and child processes read these variables. OMP_NUM_THREADS is
# not set, because programs use OpenMP for other things than the BLAS.
LATE_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")

# Variables that we set, which are not taken for the user's.
_set_by_us: dict[str, str] = {}


@dataclass(frozen=True)
class RankResources:
    """The cores and threads of one rank."""

    cores: frozenset[int]  # numbers of the cores on which the rank may run
    # The cgroup that limits the rank most, and how many cores' time its processes get.
    cgroup: tuple[str, float] | None
    threads: int  # the most that a loaded BLAS has
    is_user_set: bool  # whether the user set the number of threads


def limit_blas_threads(mpi_comm: MPI.Intracomm) -> None:
    """Limit BLAS threads if the ranks of a node have more threads than it has cores (collective).

    A node with one rank is left alone, and so are ranks whose user has set a number in
    the environment. The limit stays until the process ends, and rank 0 says so. Later
    communicators with the same number of ranks find nothing to limit.
    """
    from mpi4py import MPI

    node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        ranks = node.allgather(_own_resources())
    finally:
        node.Free()
    threads = allowed_threads(ranks)
    limit = ""
    if threads is not None:
        threadpoolctl.threadpool_limits(threads, user_api="blas")
        for name in LATE_VARIABLES:
            os.environ[name] = _set_by_us[name] = str(threads)
        limit = (
            f"{threads} for each of {len(ranks)} ranks on {usable_cores(ranks)} cores"
        )
    by_rank = mpi_comm.gather(limit)
    if by_rank is not None and any(by_rank):
        limits = "; ".join(filter(None, dict.fromkeys(by_rank)))
        text = (
            f"limited BLAS threads to {limits} (set OMP_NUM_THREADS to choose yourself)"
        )
        print(f"ChainerMN: {text}", file=sys.stderr, flush=True)


def allowed_threads(ranks: Sequence[RankResources]) -> int | None:
    """Return the BLAS threads that each rank of a node gets; None to leave them as they are."""
    cores = usable_cores(ranks)
    threads = threads_per_rank(cores, len(ranks))
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
    numbers: set[int] = set()
    quotas: dict[str, float] = {}  # by cgroup
    for rank in ranks:
        numbers |= rank.cores
        if rank.cgroup is not None:
            name, quota = rank.cgroup
            quotas[name] = quota
    cores = len(numbers)
    # Otherwise a rank may use all cores.
    if all(rank.cgroup is not None for rank in ranks):
        cores = min(cores, int(sum(quotas.values())))
    return max(1, cores)


def _own_resources() -> RankResources:
    found = threadpoolctl.threadpool_info()
    threads = max(
        (one["num_threads"] for one in found if one["user_api"] == "blas"), default=1
    )
    is_user_set = bool(chosen_thread_variables(_set_by_us))
    cores = frozenset(os.sched_getaffinity(0))
    return RankResources(cores, tightest_cgroup(), threads, is_user_set)
