"""The cores that this process may use."""

from __future__ import annotations

import os
from typing import Any

from _chainermn_cgroups import cpu_quota
from _chainermn_cgroups import folders as cgroup_folders


def available_cores() -> dict[str, Any]:
    """Return the cores of the machine, and how many of them this process may use.

    Returns:
        ``machine``, ``affinity`` (cores it may run on), ``cgroup`` (its quota, in cores; None
        without one) and ``usable``, a whole number of at least 1.
    """
    affinity = len(os.sched_getaffinity(0))
    quotas = [cpu_quota(folder) for folder in cgroup_folders("cpu")]
    quota = min((one for one in quotas if one is not None), default=None)
    usable = affinity if quota is None else min(affinity, max(1, int(quota)))
    return {
        "machine": os.cpu_count(),
        "affinity": affinity,
        "cgroup": quota,
        "usable": usable,
    }
