"""What each rank finds of every communicator; rank 0 prints all ranks' findings as JSON.

Run under mpiexec with ``-m``. Nothing is judged before all ranks have done all of it,
so that a wrong result on one rank doesn't leave the others waiting.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import signal
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from chainermn_comm import create_communicator
from tests.support.oracles.operations import OPERATIONS
from tests.support.worlds.many_ranks import wrong_means
from tests.support.worlds.models import with_grads

WORLD = MPI.COMM_WORLD


def sent_bytes() -> int:
    """What this host has sent over the network so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (row,) = [line.split() for line in lines if line.strip().startswith("eth0:")]
    return int(row[9])


def means(comm, size: int, wire: str | None) -> dict[str, object]:
    """How many bytes this host sent for the mean of so many values, and whether all are right."""
    model = with_grads(w=np.full(size, comm.rank, "f4"))
    WORLD.Barrier()
    before = sent_bytes()
    WORLD.Barrier()
    comm.allreduce_grad(model)
    WORLD.Barrier()  # by now all has been received
    sent, untouched = sent_bytes() - before, bool((model["w"].grad == comm.rank).all())
    return {
        "sent": sent,
        "untouched": untouched,
        "wrong": wrong_means(comm, wire, size),
    }


def complaint(operation, comm) -> str:
    """What the operation gave and shouldn't have; judged after its calls."""
    try:
        operation(comm, 50_000, comm.size - 1)
    except AssertionError as error:
        return f"{operation.__name__}: {error}"
    return ""


def part_of(comm) -> list[int]:
    """The ranks that share this one's part."""
    with comm.split(comm.rank % 2, comm.rank) as part:
        return part.allgather_obj(comm.rank)


def reproducible_bits(name: str, size: int) -> list[str]:
    """Digests of means, in float32 and as float16, that no topology changes."""
    random, digests = np.random.default_rng(WORLD.rank), []
    grads = {
        key: (
            random.standard_normal(count) * 10.0 ** random.uniform(-15, 1, count)
        ).astype("f4")
        for key, count in (("small", 100), ("large", size))
    }
    for wire in (None, "float16"):
        with create_communicator(
            name, allreduce_grad_dtype=wire, reproducible=True
        ) as comm:
            comm.allreduce_grad(
                model := with_grads(**{key: g.copy() for key, g in grads.items()})
            )
        means = [param.grad.tobytes() for param in model.params.values()]
        digests.append(hashlib.sha1(b"".join(means)).hexdigest())
    return digests


def findings(name: str, size: int) -> dict[str, object]:
    try:
        comm = create_communicator(name)
    except ValueError as error:
        return {"refused": str(error)}
    with comm:
        wide = means(comm, size, None)
        comm.set_config("allreduce_grad_dtype", "float16")
        return {
            "host": MPI.Get_processor_name(),
            "place": [
                comm.intra_rank,
                comm.intra_size,
                comm.inter_rank,
                comm.inter_size,
            ],
            "wide": wide,
            "narrow": means(comm, size, "float16"),
            "operations": [complaint(operation, comm) for operation in OPERATIONS],
            "part": part_of(comm),
            "bits": reproducible_bits(name, size),
        }


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    found = WORLD.gather(
        {name: findings(name, int(sys.argv[1])) for name in sys.argv[2:]}
    )
    if found is not None:
        print(json.dumps(found))
