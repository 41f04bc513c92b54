"""The memory that the ranks of this node may take."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from _chainermn_limits import cgroup_folders
from chainermn_tools.environment import memory

# What is left to everybody else, and to what cannot be foreseen.
SHARE = 0.8


def available_bytes(ranks: int) -> int:
    """Return the bytes of memory that each of ``ranks`` ranks on this node may take.

    The least of what the machine has free, what the cgroups let them, and what a
    process may have (``ulimit -v``).
    """
    free = [memory()["available_bytes"] / ranks]
    free += [
        room / ranks for folder in cgroup_folders("memory") for room in _room(folder)
    ]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        free.append(limit - pages * resource.getpagesize())
    return int(SHARE * max(0.0, min(free)))


def _room(folder: Path) -> Iterator[int]:
    """Return what is left of a cgroup's limit, of version 2 or 1; nothing where it has none."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            bound = int((folder / limit).read_text())
            stat = dict(
                line.split()
                for line in (folder / "memory.stat").read_text().splitlines()
            )
            # Files' pages are given up when they are needed.
            files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            yield bound - int((folder / used).read_text()) + files
