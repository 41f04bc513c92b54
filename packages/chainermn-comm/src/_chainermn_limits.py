"""How much of its machine this process may use: limits of cgroups, and threads for each rank.

It imports nothing of `chainermn_comm`, so that diagnostics can use it without changing
anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
# With one of these a user chooses the number of threads, and nothing is changed.
THREAD_VARIABLES = tuple(
    f"{of}_NUM_THREADS" for of in ("OMP", "OPENBLAS", "GOTO", "MKL", "BLIS")
)


def cgroup_folders(
    controller: str, membership: str | None = None, root: Path = ROOT
) -> Iterator[Path]:
    """The folders whose limits hold for this process: its cgroup's and all those above it.

    ``controller`` is "cpu" or "memory", and ``membership`` the text of
    ``/proc/self/cgroup``, read from there when None. ``root`` is where cgroups of
    version 1 and 2 are mounted.
    """
    if membership is None:
        try:
            membership = Path("/proc/self/cgroup").read_text()
        except OSError:
            return
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        tops = [root / controllers, root / controller]
        if controllers == "":  # version 2; beside version 1 it has a folder of its own
            tops = [root, root / "unified"]
        elif controller not in controllers.split(","):
            continue
        for top in tops:
            folder = top / path.lstrip("/")  # in a container this may not be there
            yield from (
                one for one in (folder, *folder.parents) if one.is_relative_to(top)
            )


def tightest_cgroup(
    membership: str | None = None, root: Path = ROOT
) -> tuple[str, float] | None:
    """Return the cgroup with the least CPU time above this process, and that time in cores."""
    folders = cgroup_folders("cpu", membership, root)
    quotas = ((str(folder), _cpu_quota(folder)) for folder in folders)
    found = [(name, quota) for name, quota in quotas if quota is not None]
    return min(found, key=lambda cgroup: cgroup[1], default=None)


def _cpu_quota(folder: Path) -> float | None:
    """Return a cgroup's CPU time in cores; None for no limit, or where the folder doesn't say."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # where the quota is "max"
            words = " ".join((folder / file).read_text() for file in files).split()
            quota, period = map(int, words)
            if quota > 0 and period > 0:  # -1 is version 1's "max"
                return quota / period
    return None


def chosen_thread_variables(ours: Mapping[str, str]) -> list[str]:
    """Return the THREAD_VARIABLES that are set, but for those with the values that we set."""
    values = {name: os.environ.get(name, "").strip() for name in THREAD_VARIABLES}
    return [name for name, value in values.items() if value not in ("", ours.get(name))]


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return how many threads each of the ranks that share these cores should compute with."""
    return max(1, cores // ranks)
