"""What each rank finds of every communicator; rank 0 prints all ranks' findings as JSON.

Run under mpiexec with ``-m``. Nothing is judged before all ranks have done all of it, so that a
wrong result on one rank doesn't leave the others waiting.
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
from tests.support.many_ranks import is_mean
from tests.support.models import with_grads
from tests.support.verbs import VERBS

from .shapes import SHAPES

WORLD = MPI.COMM_WORLD


def own_gradients(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    return {k: np.asarray(rng.standard_normal(s)).astype(d) for k, (s, d) in SHAPES.items()}


def sent_bytes() -> int:
    """What this host has sent over the network so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (row,) = [line.split() for line in lines if line.strip().startswith("eth0:")]
    return int(row[9])


def mean(comm) -> tuple[list[np.ndarray], int]:
    """This rank's means and how many bytes its host sent for them."""
    model = with_grads(**own_gradients(comm.rank))
    WORLD.Barrier()
    before = sent_bytes()
    WORLD.Barrier()
    comm.allreduce_grad(model)
    WORLD.Barrier()  # by now all has been received
    sent = sent_bytes() - before
    return [model[name].grad for name in SHAPES], sent


def is_close(grads: list[np.ndarray], size: int, wire: str | None) -> bool:
    """Whether these are the mean."""
    columns = zip(*(own_gradients(rank).values() for rank in range(size)), strict=True)
    return all(is_mean(grad, [*terms], wire) for grad, terms in zip(grads, columns, strict=True))


def hash_of(grads: list[np.ndarray]) -> str:
    return hashlib.sha1(b"".join(grad.tobytes() for grad in grads)).hexdigest()


def complaint(verb, comm) -> str:
    """What the verb gave and shouldn't have; judged after its calls."""
    try:
        verb(comm, 50_000, comm.size - 1)
    except AssertionError as error:
        return f"{verb.__name__}: {error}"
    return ""


def part_of(comm) -> list[int]:
    """The ranks that share this one's part."""
    with comm.split(comm.rank % 2, comm.rank) as part:
        return part.allgather_obj(comm.rank)


def findings(name: str) -> dict[str, object]:
    try:
        comm = create_communicator(name)
    except ValueError as error:
        return {"refused": str(error)}
    with comm:
        first, sent = mean(comm)
        again, _ = mean(comm)
        comm.set_config("allreduce_grad_dtype", "float16")
        narrow, sent_narrow = mean(comm)
        host, intra = MPI.Get_processor_name(), (comm.intra_rank, comm.intra_size)
        return {
            "host": host,
            "place": [*intra, comm.inter_rank, comm.inter_size],
            "sent": sent,
            "close": is_close(first, comm.size, None),
            "digest": hash_of(first),
            "again": hash_of(again),
            "untouched": hash_of(first) == hash_of(list(own_gradients(comm.rank).values())),
            "sent_narrow": sent_narrow,
            "close_narrow": is_close(narrow, comm.size, "float16"),
            "digest_narrow": hash_of(narrow),
            "verbs": [complaint(verb, comm) for verb in VERBS],
            "part": part_of(comm),
        }


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    found = WORLD.gather({name: findings(name) for name in sys.argv[1:]})
    if found is not None:
        print(json.dumps(found))
