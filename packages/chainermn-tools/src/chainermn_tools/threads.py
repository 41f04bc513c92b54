"""How many cores a process may use, and a rank's share of them beside others on its host.

A rank needs it before the script runs, so only the standard library is loaded.
"""

from __future__ import annotations

import os
from contextlib import suppress

from _chainermn_limits import chosen_thread_variables, threads_per_rank, tightest_cgroup

# How many ranks an mpiexec has started on this host.
LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def usable_cores() -> int:
    """Return how many cores this process may keep busy, in Slurm no more than its job's."""
    _, quota = tightest_cgroup() or ("", None)
    affinity = len(os.sched_getaffinity(0))
    granted = os.environ.get("SLURM_CPUS_ON_NODE", "")
    limits = (affinity, quota or affinity, int(granted) if granted.isdigit() else affinity)
    return max(1, int(min(limits)))


def divide_cores() -> None:
    """Set OMP_NUM_THREADS to this rank's share of cores, unless the user chose or it is unknown."""
    ranks = int(next(filter(str.isdigit, (os.environ.get(name, "") for name in LOCAL_SIZES)), 0))
    with suppress(KeyError, IndexError, ValueError):  # else srun may have started it
        counts = expand_counts(os.environ["SLURM_STEP_TASKS_PER_NODE"])
        ranks = ranks or counts[int(os.environ["SLURM_NODEID"])]
    if ranks and not chosen_thread_variables({}):
        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(usable_cores(), ranks))


def expand_counts(text: str) -> list[int]:
    """Return the numbers in Slurm's ``2(x3),1``, one a node; raise ValueError for what is none."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.removesuffix(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts
