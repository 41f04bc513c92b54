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
# If a user sets one of these variables, the number of threads stays as it is.
THREAD_VARIABLES = tuple(
    f"{of}_NUM_THREADS" for of in ("OMP", "OPENBLAS", "GOTO", "MKL", "BLIS")
)


def cgroup_folders(
    controller: str, membership: str | None = None, root: Path = ROOT
) -> Iterator[Path]:
    """Yield the folders whose limits hold for this process: its cgroup's and all above it.

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
        if controllers == "":  # version 2, which beside version 1 has its own folder
            tops = [root, root / "unified"]
        elif controller not in controllers.split(","):
            continue
        for top in tops:
            folder = top / path.lstrip("/")  # in a container the folder may be missing
            for each in (folder, *folder.parents):
                if each.is_relative_to(top):
                    yield each


def tightest_cgroup(
    membership: str | None = None, root: Path = ROOT
) -> tuple[str, float] | None:
    """Return the cgroup with the least CPU time above this process, and that time in cores."""
    tightest = None
    for folder in cgroup_folders("cpu", membership, root):
        quota = _cpu_quota(folder)
        if quota is not None and (tightest is None or quota < tightest[1]):
            tightest = str(folder), quota
    return tightest


def _cpu_quota(folder: Path) -> float | None:
    """Return a cgroup's CPU limit in cores; None if it has none, or none can be read."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # the quota may be "max"
            words = " ".join((folder / file).read_text() for file in files).split()
            quota, period = map(int, words)
            if quota > 0 and period > 0:  # -1 is version 1's "max"
                return quota / period
    return None


def chosen_thread_variables(ours: Mapping[str, str]) -> list[str]:
    """Return the THREAD_VARIABLES that are set, except to values that we have set."""
    values = {name: os.environ.get(name, "").strip() for name in THREAD_VARIABLES}
    return [name for name, value in values.items() if value not in ("", ours.get(name))]


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return how many threads each of the ranks that share these cores should compute with."""
    return max(1, cores // ranks)
