"""Starts the ranks of a benchmark through mpiexec, and collects the report of rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.bench import worker
from chainermn_tools.launch import run_script

# Beyond the time that the ranks give themselves: to start, and to end by themselves first.
START_SECONDS = 30.0


class Failed(Exception):
    """The job gave no result. The message says why; `status` is the exit status to end with."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def measure_on(
    ranks: int, names: Sequence[str], sizes: Sequence[int], seconds: float, limit: float
) -> dict[str, Any]:
    """Start so many ranks, as `chainermn launch` would, and have them call `worker.measure_here`.

    Raises:
        Failed: there is no mpiexec, or the job failed, was interrupted, or took too long.
    """
    try:
        launcher = jobs.find_mpiexec()
    except ValueError as error:
        raise Failed(str(error), 2) from None
    what = {"names": list(names), "sizes": list(sizes), "seconds": seconds, "limit": limit}
    script = [worker.__file__, json.dumps(what)]
    timeout = limit + START_SECONDS
    try:
        result, output = run_script(launcher, ranks, script, worker.say, timeout=timeout)
    except FileNotFoundError as error:
        raise Failed(f"mpiexec doesn't start: {error}", 2) from None
    if output.interrupted is not None:
        raise Failed(f"ended by signal {output.interrupted}", 128 + output.interrupted)
    if output.timed_out:
        raise Failed(f"the job did not end within {timeout:g} s", worker.TIMED_OUT)
    if not result.success:
        raise Failed(result.message, result.status)
    found = output.first_of(worker.EVENT)
    if 0 not in found:
        raise Failed("all ranks ended well, but the result of rank 0 did not arrive here", 1)
    report: dict[str, Any] = found[0]["report"]
    return report
