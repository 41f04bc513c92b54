"""A rank under load: calls back to back, each value checked; what the process holds stays.

    python loads.py COUNT

Rank 0 prints what each rank held before and after
most of the calls, as a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

from chainermn_comm import create_communicator
from tests.support.oracles import verbs
from tests.support.worlds.models import check_mean

# Of the calls, the first part: imports, caches and MPI's own buffers grow then.
WARM = 0.5


def look() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])  # resident
    files = os.listdir("/proc/self/fd")
    threads = os.listdir("/proc/self/task")
    return {
        "files": len(files),
        "threads": len(threads),
        "bytes": pages * resource.getpagesize(),
    }


def calls(choose: random.Random) -> Iterator[None]:
    """Small calls of all kinds, and now and then a mean of any size."""
    comm = create_communicator("hierarchical")
    while True:
        if choose.random() < 0.02:
            check_mean(comm, choose.choice((1, 2000, 70_000, 300_000)))
        assert comm.allgather_obj(comm.rank) == [*range(comm.size)]
        verb = choose.choice((*verbs.MOVES, verbs.allreduce))
        dtype = choose.choice(verbs.INTEGERS)
        yield verbs.check_one(comm, verb, [False] * comm.size, dtype, "C", None)


def main():
    load = calls(random.Random(1))
    count = int(sys.argv[1])
    for _ in range(int(WARM * count)):
        next(load)
    warm = look()
    for _ in range(int(WARM * count), count):
        next(load)
    found = MPI.COMM_WORLD.gather([warm, look()])
    if found is not None:
        print("HELD", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
