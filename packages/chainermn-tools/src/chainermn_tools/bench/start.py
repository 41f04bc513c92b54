"""Starts the ranks of a benchmark through mpiexec, and collects the report of rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.bench import worker
from chainermn_tools.launch import JobResult, run_script

# Beyond the time that the ranks give themselves: to start, and to end by themselves first.
START_SECONDS = 30.0


def measure_on(
    ranks: int, names: Sequence[str], sizes: Sequence[int], seconds: float, limit: float
) -> tuple[JobResult, dict[str, Any]]:
    """Start so many ranks, as `chainermn launch` would, and have them call `worker.measure_here`.

    Returns:
        What became of the job, and the report, which is empty unless that succeeded.
    """
    try:
        launcher = jobs.find_mpiexec()
    except ValueError as error:
        return JobResult(False, 2, str(error)), {}
    what = {"names": list(names), "sizes": list(sizes), "seconds": seconds, "limit": limit}
    script = [worker.__file__, json.dumps(what)]
    timeout = limit + START_SECONDS
    result, output = run_script(launcher, ranks, script, worker.say, timeout=timeout)
    if not result.success:
        return result, {}
    found = output.first_of(worker.EVENT)
    if 0 not in found:
        message = "all ranks ended well, but the result of rank 0 did not arrive here"
        return JobResult(False, 1, message), {}
    return result, found[0]["report"]
