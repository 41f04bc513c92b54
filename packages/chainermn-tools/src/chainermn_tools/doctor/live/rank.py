"""What each rank runs that the doctor starts: step after step, each noted in a file of its own.

    python rank.py FOLDER RANKS SECONDS

Notes are lines of JSON in FOLDER/<process>; so what was found stays, however the rank ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chainermn_tools.doctor.live import steps

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# What a rank prints in its turn; the doctor looks for it in mpiexec's output.
TURN = "chainermn-doctor-turn"
# For mpiexec to read one rank's line before the next rank writes its own.
TURN_SECONDS = 0.1
# A rank that nobody ends any more ends itself so much later than it should have been.
SPARE_SECONDS = 10


class Notes:
    """The file in which a rank says how far it is."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / str(os.getpid())).open("a")

    def begin(self, step: str) -> None:
        """The rank does this from now on."""
        self._write(step=step, state="begun")

    def end(self, step: str, **found: Any) -> None:
        """The rank has done this, and found that."""
        self._write(step=step, state="done", found=found)

    def _write(self, **record: Any) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def main() -> None:
    """Take all steps."""
    folder, ranks, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    # Its default action ends a process even while it is stuck in C.
    signal.alarm(int(seconds) + SPARE_SECONDS)
    notes = Notes(folder)
    notes.begin(steps.START)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    notes.end(
        steps.START,
        rank=world.rank,
        size=world.size,
        host=socket.gethostname(),
        level=_thread_level(MPI),
    )
    if world.size != ranks:
        return  # whether it is alone or not, it is not what was asked for
    notes.begin(steps.MEET)
    notes.end(steps.MEET, ranks=world.allgather(world.rank))
    notes.begin(steps.ORDER)
    _take_turns(world)
    notes.end(steps.ORDER)
    from chainermn_tools.doctor.live import trying

    notes.begin(steps.MESSAGES)
    notes.end(steps.MESSAGES, **trying.messages(world))
    for name in steps.COMMUNICATORS:
        notes.begin(steps.of_communicator(name))
        notes.end(steps.of_communicator(name), **trying.communicator(world, name))
    notes.begin(steps.DEVICE)
    notes.end(steps.DEVICE, **trying.device_reduce(world))
    notes.begin(steps.END)
    MPI.Finalize()
    notes.end(steps.END)


def _take_turns(world: MPI.Intracomm) -> None:
    for rank in range(world.size):
        if rank == world.rank:
            os.write(1, f"{TURN} {rank} {world.size} {socket.gethostname()}\n".encode())
        time.sleep(TURN_SECONDS)
        world.Barrier()


def _thread_level(mpi: Any) -> str:
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    found = mpi.Query_thread()
    return next(name.lower() for name in levels if getattr(mpi, f"THREAD_{name}") == found)


if __name__ == "__main__":
    main()
