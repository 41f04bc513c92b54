"""Times what the watchdog's note of a call costs, beside the meeting of ranks that it is a note of.

    mpiexec -n 2 python benchmarks/record.py

Rank 0 prints, in microseconds, the best and the median of blocks of calls: an empty method, one
that is watched and noted (the difference is the cost), four numbers packed into memory (what no
note can do without), and the agreement of the ranks that every collective call begins with.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np

from chainermn_comm import create_communicator
from chainermn_comm.watchdog import NOBODY, watched

BLOCKS, CALLS = 200, 100


class Noted:
    """A communicator whose calls do nothing."""

    def __init__(self, record: object) -> None:
        self._record = record

    def empty(self) -> None:
        pass

    @watched
    def noted(self) -> None:
        self._record.collective("allreduce", 1, NOBODY, 400)  # type: ignore[attr-defined]


def microseconds(call: Callable[[], object]) -> np.ndarray:
    """Of a call, the mean over each block."""
    found = np.zeros(BLOCKS)
    for block in range(BLOCKS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        found[block] = (time.perf_counter() - start) / CALLS * 1e6
    return found


def main() -> None:
    with create_communicator("naive") as comm:
        methods, memory, pack = Noted(comm._record), bytearray(64), struct.Struct("<BdQq").pack_into
        ways = {
            "empty": methods.empty,
            "noted": methods.noted,
            "packed": lambda: pack(memory, 0, 1, 1.0, 1, 1),
            "agreement": lambda: comm.allgather_bytes(b""),
        }
        seconds = {name: microseconds(way) for name, way in ways.items()}
        if comm.rank == 0:
            for name, each in seconds.items():
                print(f"{name:10} best {each.min():.2f} us, median {np.median(each):.2f} us")
            cost = seconds["noted"].min() - seconds["empty"].min()
            print(f"a note costs {cost:.2f} us at best")


if __name__ == "__main__":
    main()
