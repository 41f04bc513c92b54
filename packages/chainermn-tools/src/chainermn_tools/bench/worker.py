"""Starts the ranks of a benchmark, and is what each rank runs, whatever started it.

Run as a script by `chainermn bench`, it sends the result to its parent as an event.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.bench import runner
from chainermn_tools.launch import JobResult, run_script
from chainermn_tools.long_events import emit

EVENT = "bench"  # with the report; each row of its tables is an event of its own
TABLES = ("hosts", "checks", "results", "skipped")
# Beyond the time that the ranks give themselves: to start, and to end by themselves
# first.
START_SECONDS = 30.0


def measure_on(
    ranks: int, names: Sequence[str], sizes: Sequence[int], seconds: float, limit: float
) -> tuple[JobResult, dict[str, Any]]:
    """Start ``ranks`` ranks, as `chainermn launch` would, and have them call `measure_here`.

    Return what became of the job, and the report, which is empty unless that succeeded.
    """
    try:
        launcher = jobs.find_mpiexec()
    except jobs.Unavailable as error:
        return JobResult(False, 2, str(error)), {}
    what = {
        "names": list(names),
        "sizes": list(sizes),
        "seconds": seconds,
        "limit": limit,
    }
    script = [__file__, json.dumps(what)]
    timeout = limit + START_SECONDS
    result, output = run_script(launcher, ranks, script, log, timeout=timeout)
    if not result.success:
        return result, {}
    events = [event for event in output.events if event.kind == EVENT]
    if not events or events[-1]["rows"] != len(events) - 1:
        message = "all ranks ended well, but the result of rank 0 did not arrive here"
        return JobResult(False, 1, message), {}
    report = events.pop()["report"]
    return result, report | {
        table: [event["row"] for event in events if event["table"] == table]
        for table in TABLES
    }


def measure_here(
    names: Sequence[str], sizes: Sequence[int], seconds: float, limit: float
) -> dict[str, Any] | None:
    """Have a rank of an MPI job `measure` (collective over all its ranks).

    After ``limit`` seconds this process ends, and with it the job. Return the report at
    rank 0, None elsewhere. Raise Unavailable if MPI doesn't load, or knows of fewer
    ranks than started.
    """
    timer = threading.Timer(limit, _give_up, (limit,))
    timer.daemon = True
    timer.start()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise jobs.Unavailable(f"MPI doesn't load: {error}") from None
    world = MPI.COMM_WORLD
    started = jobs.rank_from_env()
    if started is not None and started[1] not in (None, world.size):
        raise jobs.Unavailable(
            f"{started[1]} processes were started and each is rank {world.rank} of {world.size}: "
            "this launcher is not that of mpi4py's MPI; see `chainermn env`"
        )
    report = runner.measure(world, names, sizes, seconds, log)
    timer.cancel()
    return report if world.rank == 0 else None


def log(text: str) -> None:
    """Report to the user on standard error."""
    sys.stderr.write(f"chainermn bench: {text}\n")
    sys.stderr.flush()


def _give_up(limit: float) -> None:
    rank = (jobs.rank_from_env() or (0, 1))[0]
    os.write(
        2, f"chainermn bench: rank {rank} did not end within {limit:g} s\n".encode()
    )
    os._exit(jobs.TIMEOUT_STATUS)


if __name__ == "__main__":  # as a rank that `measure_on` started
    found = measure_here(**json.loads(sys.argv[1]))
    if found is not None:
        rows = [(table, row) for table in TABLES for row in found.pop(table)]
        for table, row in rows:
            emit(EVENT, table=table, row=row)
        emit(EVENT, rows=len(rows), report=found)
