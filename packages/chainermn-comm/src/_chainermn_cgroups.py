"""The cgroups whose limits hold for this process, of which version 1 and 2 are read.

It imports nothing of `chainermn_comm`, so that diagnostics can use it without changing anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def folders(controller: str, membership: str | None = None, root: Path = ROOT) -> Iterator[Path]:
    """The folders whose limits hold for this process: its cgroup's and all those above it.

    Args:
        controller: ``"cpu"`` or ``"memory"``.
        membership: text of ``/proc/self/cgroup``; read from there when None.
        root: where cgroups are mounted.
    """
    if membership is None:
        try:
            membership = Path("/proc/self/cgroup").read_text()
        except OSError:
            return
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        tops: Iterable[Path] = ()
        if controllers == "":  # version 2; beside version 1 it has a folder of its own
            tops = (root, root / "unified")
        elif controller in controllers.split(","):
            tops = (root / controllers, root / controller)
        for top in tops:
            folder = top / path.lstrip("/")  # in a container this may not be there
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(top))


def cpu_quota(folder: Path) -> float | None:
    """A cgroup's CPU time in cores; None for no limit, or where the folder doesn't say."""
    quota, period = "max", "0"
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        break
    if quota == "max" or int(quota) <= 0 or int(period) <= 0:  # -1 is version 1's "max"
        return None
    return int(quota) / int(period)
