"""Times cases in turn on this rank, and tells what their first calls add to its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peers
from in_turn import time_in_turn
from mpi4py import MPI

# Calls before any is counted: a way in a node is measured nine times before one is
# chosen.
WARM_UP_CALLS = 20
IN_A_ROW = 2


def measure(
    cases: list[peers.Case],
    comm: MPI.Intracomm,
    rounds: int,
    realtime: bool,
    warm_up: int = WARM_UP_CALLS,
    calls: int = 1,
) -> list[dict[str, Any]]:
    """Time the cases in turn, each once a round (collective).

    It is called twice then, and the second call counts: as in a loop, its code and what
    it works on lie in the caches, whoever's turn was before. So many ``calls`` count as
    one.

    Returns:
        For each its name and kind; ``ms``, of a round's slowest rank, for each round;
        ``right``, whether the results of its first and last calls were;
        ``extra_bytes``, the most that its first call added to a rank's memory, or None
        where unknown.
    """
    extra, right = [], []
    for case in cases:
        before = reset_peak()
        call_once(case, comm, realtime)  # not counted: the first call allocates
        grown = comm.allgather(peak() - before if before else None)
        extra.append(None if None in grown else max(grown))
        right.append(case.right())
    seconds = time_in_turn(
        comm,
        [case.timed for case in cases],
        rounds,
        warm_up=min(warm_up // IN_A_ROW, rounds),  # a short run need not be exact
        in_a_row=IN_A_ROW,
        calls=calls,
        realtime=realtime,
    )
    for i, case in enumerate(cases):
        call_once(case, comm, realtime)
        right[i] &= case.right()
    return [
        {
            "name": case.name,
            "kind": case.kind,
            "ms": (seconds[:, i, -1] * 1e3).round(6).tolist(),
            "right": right[i],
            "extra_bytes": extra[i],
        }
        for i, case in enumerate(cases)
    ]


def call_once(case: peers.Case, comm: MPI.Intracomm, realtime: bool) -> None:
    """Call a case as it is timed (collective)."""
    time_in_turn(comm, [case.timed], 1, realtime=realtime)


def reset_peak() -> int:
    """Reset the peak of this process's memory.

    Returns:
        The bytes it holds now, or 0 where Linux doesn't let us.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def peak() -> int:
    """The most bytes that this process held since `reset_peak`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(
        int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")
    )
