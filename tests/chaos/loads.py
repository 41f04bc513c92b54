"""A rank under load: calls back to back, each value checked, and what the process holds.

    python loads.py LOAD COUNT

LOAD is the name of a function below. Rank 0 prints the samples of all as a line of
JSON.
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
from tests.support.oracles.operations import OPERATIONS, bcast
from tests.support.worlds.models import check_mean

# How often a rank looks at itself, over the run.
SAMPLES = 30
NAMES = ("hierarchical", "naive", "flat", "two_dimensional", "single_node")


def look() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    found = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")}
    pages = int(Path("/proc/self/statm").read_text().split()[1])  # resident
    return found | {"bytes": pages * resource.getpagesize()}


def collectives(choose: random.Random) -> Iterator[None]:
    """Small calls."""
    comm = create_communicator("hierarchical")
    while True:
        yield choose.choice(OPERATIONS)(
            comm, choose.randrange(1, 300), choose.randrange(comm.size)
        )


def communicators(choose: random.Random) -> Iterator[None]:
    """Communicators, each used and freed."""
    keeper = create_communicator("naive")  # so that the monitor stays the same
    while True:
        for number in range(7 * len(NAMES)):
            comm = create_communicator(NAMES[number % len(NAMES)])
            if number % 7 == 0:
                with comm.split(comm.rank % 2, comm.rank) as part:
                    check_mean(part, choose.randrange(1, 2000))
            yield check_mean(comm, choose.randrange(1, 2000))
            comm.finalize()
        bcast(keeper, 9, 0)


def mixed(choose: random.Random) -> Iterator[None]:
    """Calls of all kinds, of all sizes."""
    comm = create_communicator("hierarchical")
    for _ in collectives(choose):
        if choose.random() < 0.2:
            check_mean(comm, choose.choice((1, 2000, 70_000, 300_000)))
        yield


def main() -> None:
    load, count = globals()[sys.argv[1]](random.Random(1)), int(sys.argv[2])
    samples = []
    for number in range(count):
        next(load)
        if (number + 1) % (count // SAMPLES) == 0:
            samples.append(look())
    found = MPI.COMM_WORLD.gather(samples)
    if found is not None:
        print("LOADED", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
