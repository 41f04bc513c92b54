"""What each rank finds of every communicator on CPUs over imposed topologies; run under mpiexec.

Nothing is judged before all ranks have done all of it, so that a wrong result on one
rank doesn't leave the others waiting. Rank 0 prints what is wrong, and how many means
were taken.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import signal
import sys
from functools import lru_cache
from typing import NoReturn

import numpy as np
from mpi4py import MPI
from numpy.random import default_rng

from chainermn_comm import CommunicatorBase
from chainermn_comm.config import CHUNK_VARIABLE
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import on_nodes

WORLD = MPI.COMM_WORLD
# Nodes of the ranks. One node; all separate; uneven; dealt out in turn; more nodes than
# four.
TOPOLOGIES = {
    5: ["00000", "01234", "00111", "01010", "00001"],
    6: ["000000", "012345", "001122", "012012", "012344"],
    7: ["0000000", "0123456", "0011112", "0101010", "0123444"],
    8: ["00000000", "01234567", "00011111", "01010101", "01230123", "01234444"],
}
SHAPES = {"a": (), "b": (3, 7), "c": (0,), "d": (1,), "e": (257,), "f": (16,)}
DTYPES = ("float32", "float64", "float16")
# By the bytes of a chunk, a float32 array that stands beside these: they have many of
# the smallest chunks by themselves; some chunks; two of the default size, or it is
# exchanged pairwise.
LARGER = {"64": 0, "8192": 9001, "": 280_000}
# The algorithms that differ; the other names take one of these.
ALGORITHMS = ("naive", "flat", "hierarchical", "two_dimensional")
CALLS = 2


def runs(ranks: int) -> list[tuple[str, str, str]]:
    """Of so many ranks: bytes of chunks, names of communicators, nodes."""
    every = TOPOLOGIES[ranks]
    return [
        (chunk_bytes, name, nodes)
        for chunk_bytes, where in (
            ("64", every),
            ("8192", every[2:4]),
            ("", every[:2]),
        )
        for name in ALGORITHMS
        for nodes in where
    ]


@lru_cache(maxsize=32)
def _gradients(rank: int, call: int, larger: int) -> dict[str, np.ndarray]:
    rng = default_rng([rank, call])
    small = {
        name + dtype: np.asarray(rng.standard_normal(shape)).astype(dtype)
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }
    return small | {"larger": rng.standard_normal(larger, "f4")}


def _is_mean(grad: np.ndarray, terms: list[np.ndarray], wire: str | None) -> bool:
    """Whether this is the float64 mean, but for a few roundings in the narrowest type."""
    narrow = min(
        wire or grad.dtype, grad.dtype, key=lambda dtype: np.finfo(dtype).nmant
    )
    wide = [term.astype("f8") for term in terms]
    scale = sum(map(np.abs, wide)) / len(wide)
    bound = 4 * float(np.finfo(narrow).eps) * scale + float(
        np.finfo(narrow).smallest_subnormal
    )
    distance = np.abs(grad.astype("f8") - sum(wide) / len(wide))
    return bool(np.all(distance <= bound))


def wrong_means(comm: CommunicatorBase, wire: str | None, larger: int) -> list[str]:
    """What is wrong with this communicator's means, on this rank or between ranks."""
    wrong = []
    digests = []
    found = []
    for call in (*range(CALLS), 0):  # the first again, which must give the same bits
        own = _gradients(comm.rank, call, larger)
        model = with_grads(**{key: grad.copy() for key, grad in own.items()})
        comm.allreduce_grad(model)
        grads = {key: param.grad for key, param in model.params.items()}
        found.append(grads)
        digests.append(
            hashlib.sha1(b"".join(g.tobytes() for g in grads.values())).digest()
        )
    views = comm.allgather_obj(digests)
    if any(view != views[0] for view in views):
        wrong.append("other bits on another rank")
    if digests[0] != digests[-1]:
        wrong.append("other bits the second time")
    for call in range(CALLS):
        terms = [_gradients(rank, call, larger) for rank in range(WORLD.size)]
        wrong += [
            f"call {call}, {key}: not the mean"
            for key, grad in found[call].items()
            if not _is_mean(grad, [term[key] for term in terms], wire)
        ]
    return wrong


def report(wrong: list[str], means: int) -> NoReturn:
    """Print what was wrong on all ranks, and how many means were taken; exit with 1 if any was."""
    everywhere = WORLD.gather(wrong)
    if everywhere is not None:
        print("\n".join(line for lines in everywhere for line in lines))
        print("MEANS", means)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    wrong = []
    means = 0
    for chunk_bytes, name, nodes in runs(WORLD.size):
        os.environ[CHUNK_VARIABLE] = chunk_bytes
        # Others aren't pairwise.
        wires = (None,)
        if chunk_bytes:
            wires = ("float16", None, "float64")
        wire = wires[means // (CALLS + 1) % len(wires)]
        with on_nodes(nodes, name, allreduce_grad_dtype=wire) as comm:
            found = wrong_means(comm, wire, LARGER[chunk_bytes])
        where = f"rank {WORLD.rank}: {name}, nodes {nodes}, wire {wire}"
        wrong += [f"{where}: {one}" for one in found]
        means += CALLS + 1
    report(wrong, means)
