"""A rank under load: calls back to back, each value checked, and what the process holds.

Run by test_loads.py as `loads.py collectives COUNT`, `loads.py communicators COUNT` or
`loads.py mixed SECONDS`. Each rank prints its samples as a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable

import numpy as np

from chainermn_comm import create_communicator
from tests.support.models import with_grads

# How often a rank looks at itself, over the run.
SAMPLES = 30


def look() -> dict[str, float]:
    """What this process holds now."""
    gc.collect()
    found = {"at": time.monotonic(), "files": len(os.listdir("/proc/self/fd"))}
    found["threads"] = len(os.listdir("/proc/self/task"))
    with open("/proc/self/smaps_rollup") as file:
        for line in file:
            words = line.split()
            if words[0] in ("Rss:", "Pss:"):
                found[words[0][:-1].lower()] = int(words[1]) * 1024
    return found


def mean_of_gradients(comm, rng):
    shapes = [(rng.randrange(1, 2000),), (3, rng.randrange(1, 40)), ()]
    grads = [np.full(shape, comm.rank + number, "f4") for number, shape in enumerate(shapes)]
    model = with_grads(**{f"w{number}": grad for number, grad in enumerate(grads)})
    comm.allreduce_grad(model)
    mean = (comm.size - 1) / 2
    for number, (_, param) in enumerate(model.namedparams()):
        assert (param.grad == mean + number).all(), (number, param.grad)


def large_mean(comm, rng):
    model = with_grads(w=np.full(rng.choice((70_000, 300_000)), comm.rank, "f4"))
    comm.multi_node_mean_grad(model)
    assert (model["w"].grad == (comm.size - 1) / 2).all()


def allreduce(comm, rng):
    x = np.arange(rng.randrange(1, 300), dtype="f8") + comm.rank
    total = comm.allreduce(x)
    assert (total == (x - comm.rank) * comm.size + sum(range(comm.size))).all()


def bcast(comm, rng):
    root, n = rng.randrange(comm.size), rng.randrange(1, 300)
    x = np.full(n, comm.rank, "i4")
    assert (comm.bcast(x, root=root) == np.full(n, root)).all()


def allgather(comm, rng):
    found = comm.allgather(np.full(rng.randrange(1, 50), comm.rank, "f4"))
    assert [int(x[0]) for x in found] == list(range(comm.size))


def gather(comm, rng):
    root = rng.randrange(comm.size)
    found = comm.gather(np.float32(comm.rank), root=root)
    if comm.rank == root:
        assert [int(x) for x in found] == list(range(comm.size))


def scatter(comm, rng):
    root = rng.randrange(comm.size)
    xs = [np.full(3, 10 * root + rank, "f4") for rank in range(comm.size)]
    assert (
        comm.scatter(xs if comm.rank == root else None, root=root) == 10 * root + comm.rank
    ).all()


def alltoall(comm, rng):
    found = comm.alltoall([np.array([comm.rank, rank]) for rank in range(comm.size)])
    assert [x.tolist() for x in found] == [[rank, comm.rank] for rank in range(comm.size)]


def objects(comm, rng):
    text = "x" * rng.randrange(500)
    assert comm.allgather_obj((comm.rank, text)) == [(r, text) for r in range(comm.size)]
    assert comm.bcast_obj(comm.rank, root=comm.size - 1) == comm.size - 1


def ring(comm, rng):
    """Each to the next: even ranks send first."""
    number, to, back = rng.random(), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent = np.array([number, comm.rank])
    if comm.rank % 2 == 0:
        comm.send(sent, to)
    got = comm.recv(back)
    if comm.rank % 2:
        comm.send(sent, to)
    assert got.tolist() == [number, back]


OPERATIONS: list[Callable] = [
    *(mean_of_gradients, large_mean, allreduce, bcast, allgather, gather, scatter, alltoall),
    *(objects, ring),
]


def collectives(count: int) -> tuple[int, list[dict[str, float]]]:
    """So many small calls, of which each rank knows the result."""
    comm = create_communicator("hierarchical")
    rng = random.Random(1)
    samples = []
    cheap = [allreduce, bcast, allgather, gather, scatter, alltoall]
    for number in range(count):
        rng.choice(cheap)(comm, rng)
        if (number + 1) % (count // SAMPLES) == 0:
            samples.append(look())
    return count, samples


def communicators(count: int) -> tuple[int, list[dict[str, float]]]:
    """So many communicators, each used and freed."""
    keeper = create_communicator("naive")  # so that the monitor stays the same
    rng = random.Random(2)
    names = ("hierarchical", "naive", "flat", "two_dimensional", "single_node")
    samples = []
    for number in range(count):
        comm = create_communicator(names[number % len(names)])
        if number % 7 == 0:
            part = comm.split(comm.rank % 2, comm.rank)
            mean_of_gradients(part, rng)
            part.finalize()
        mean_of_gradients(comm, rng)
        comm.finalize()
        if (number + 1) % (count // SAMPLES) == 0:
            samples.append(look())
    bcast(keeper, rng)
    return count, samples


def mixed(seconds: float) -> tuple[int, list[dict[str, float]]]:
    """Calls of all kinds for so long."""
    comm = create_communicator("hierarchical")
    rng = random.Random(3)
    start, done, samples = time.monotonic(), 0, []
    while True:
        for _ in range(20):
            rng.choice(OPERATIONS)(comm, rng)
            done += 1
        elapsed = comm.bcast_obj(time.monotonic() - start)
        if elapsed > len(samples) * seconds / SAMPLES:
            samples.append(look())
        if elapsed > seconds:
            return done, samples


def main() -> None:
    what, amount = sys.argv[1], float(sys.argv[2])
    done, samples = {"collectives": collectives, "communicators": communicators, "mixed": mixed}[
        what
    ](amount if what == "mixed" else int(amount))
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    everyone = world.gather({"rank": world.rank, "done": done, "samples": samples})
    if everyone is not None:
        print("LOADED", json.dumps(everyone), flush=True)


if __name__ == "__main__":
    main()
