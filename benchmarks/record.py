"""Times what the watchdog's record of a call costs, beside the handshake of which it is a record.

    mpiexec -n 2 python benchmarks/record.py

Rank 0 prints, in microseconds, the best and the median of blocks of calls: an empty
method, one that is observed and recorded (the difference is the cost), four numbers
packed into memory (what no record can do without), and the handshake that every
collective call begins with.
"""

from __future__ import annotations

import struct

import numpy as np
from in_turn import Timed, time_in_turn
from rich.console import Console
from tables import make_table

from chainermn_comm import create_communicator
from chainermn_comm.messaging import ProcessGroup
from chainermn_comm.observers import NOBODY

BLOCKS, CALLS = 200, 100


class RecordedCalls:
    """A communicator whose calls do nothing."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def empty(self) -> None:
        pass

    def recorded(self) -> None:
        with self._group.call("allreduce"):
            observer = self._group.handshake.observer
            observer.collective("allreduce", 1, NOBODY, 400)


def main() -> None:
    with create_communicator("naive") as comm:
        methods, memory, pack = (
            RecordedCalls(comm._group),
            bytearray(64),
            struct.Struct("<BdQq").pack_into,
        )
        ways = {
            "empty": methods.empty,
            "recorded": methods.recorded,
            "packed": lambda: pack(memory, 0, 1, 1.0, 1, 1),
            "handshake": lambda: comm.handshake("handshake"),
        }
        seconds = time_in_turn(
            None, [Timed(way) for way in ways.values()], BLOCKS, calls=CALLS
        )
        micros = dict(zip(ways, 1e6 * seconds[:, :, 0].T, strict=True))
        if comm.rank == 0:
            rows = [
                (name, f"{each.min():.2f}", f"{np.median(each):.2f}")
                for name, each in micros.items()
            ]
            Console().print(make_table("microseconds", ("best", "median"), rows))
            cost = micros["recorded"].min() - micros["empty"].min()
            print(f"a record costs {cost:.2f} us at best")


if __name__ == "__main__":
    main()
