"""The cores that this process may use."""

from __future__ import annotations

import os
from typing import Any

from _chainermn_limits import tightest_cgroup
from chainermn_tools.threads import usable_cores


def available_cores() -> dict[str, Any]:
    """Return the cores of the ``machine``, and how many of them this process may use.

    They are ``affinity`` (those it may run on), ``cgroup`` (its quota, in cores; None without one)
    and ``usable``, a whole number of at least 1.
    """
    affinity = len(os.sched_getaffinity(0))
    _, quota = tightest_cgroup() or ("", None)
    usable = usable_cores()
    return {"machine": os.cpu_count(), "affinity": affinity, "cgroup": quota, "usable": usable}
