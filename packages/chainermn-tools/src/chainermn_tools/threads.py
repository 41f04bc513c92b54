"""How many cores a process may use, and a rank's share of them beside others on its host.

A rank needs it before the script runs, so only the standard library is loaded.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import _chainermn_limits
from _chainermn_limits import chosen_thread_variables, tightest_cgroup

# The variables in which an mpiexec says how many ranks it has started on this host.
LOCAL_SIZES = (
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)


def available_cores() -> dict[str, Any]:
    """Return the cores of the ``machine``, and how many of them this process may use.

    The latter are ``affinity`` (the cores on which it may run), ``cgroup`` (its quota
    in cores; None without one) and ``usable``, a whole number of at least 1, and in
    Slurm at most the job's cores.
    """
    affinity = len(os.sched_getaffinity(0))
    least: float = affinity
    quota = None
    if (tightest := tightest_cgroup()) is not None:
        quota = tightest[1]
        least = min(least, quota)
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    if granted.isdigit():
        least = min(least, int(granted))
    return {
        "machine": os.cpu_count(),
        "affinity": affinity,
        "cgroup": quota,
        "usable": max(1, int(least)),
    }


def threads_per_rank(ranks: int) -> int | None:
    """Return the number of threads for each of the ranks here; None if the user has chosen one.

    On other hosts each rank counts for itself.
    """
    if chosen_thread_variables({}):
        return None
    return _chainermn_limits.threads_per_rank(int(available_cores()["usable"]), ranks)


def divide_cores() -> None:
    """Set OMP_NUM_THREADS to this rank's share of cores, unless the user chose or it is unknown."""
    ranks = 0
    for name in LOCAL_SIZES:
        if not ranks and os.environ.get(name, "").isdigit():
            ranks = int(os.environ[name])
    # Otherwise srun may have started it.
    with suppress(KeyError, IndexError, ValueError):
        counts = expand_counts(os.environ["SLURM_STEP_TASKS_PER_NODE"])
        ranks = ranks or counts[int(os.environ["SLURM_NODEID"])]
    if ranks and (threads := threads_per_rank(ranks)):
        os.environ["OMP_NUM_THREADS"] = str(threads)


def expand_counts(text: str) -> list[int]:
    """Return the numbers in Slurm's ``2(x3),1``, one per node; raise ValueError for other texts."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts
