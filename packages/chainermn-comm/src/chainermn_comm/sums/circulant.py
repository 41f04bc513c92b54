"""Sums for many ranks, in about log2(ranks) rounds each way.

Reduce-scatter and allgather on a circulant graph: J. L. Träff, "Optimal, Non-pipelined
Reduce-scatter and Allreduce Algorithms", 2024, arXiv:2410.14234. For any number p of
ranks each takes ceil(log2(p)) rounds, in which a rank sends and receives p - 1 of p
blocks in all. Block i is summed on rank i, in an order that follows from p and i. See
docs/decisions/scaling.md.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from ..messaging import start_exchange
from ..numbers import accumulator, cast_into, combine_into, divide_into
from .rounds import ReceiveMemory, Rounds


class Round(NamedTuple):
    """One round of a rank, which counts blocks from its own one on."""

    skip: int  # the distance to the peer, and the first block that is sent to it
    held: int  # the number of blocks before the round, of which ``skip`` are kept


@cache
def rounds_of(size: int) -> tuple[Round, ...]:
    """Return the rounds of a reduce-scatter over ``size`` ranks."""
    found = []
    held = size
    while held > 1:
        skip = -(-held // 2)
        found.append(Round(skip, held))
        held = skip
    return tuple(found)


def circulant_rounds(
    comm: MPI.Intracomm,
    tag: int,
    memory: ReceiveMemory,
    source: np.ndarray,
    target: np.ndarray,
    divisor: int,
    op: np.ufunc,
) -> Rounds:
    """Do what :func:`pairwise_rounds` does, in another order of ranks.

    Partial sums travel in :func:`accumulator`'s dtype.
    """
    rank = comm.rank
    size = comm.size
    total = target
    if accumulator(target.dtype) != target.dtype:
        total = np.empty(target.size, accumulator(target.dtype))
    if total is not source:
        cast_into(source, total)
    sent = source  # as narrow as it is
    for skip, held in rounds_of(size):
        kept = _blocks(total, rank, size, 0, held - skip)
        count = sum(part.size for part in kept)
        with memory.borrowed(count * sent.itemsize) as received:
            terms = _divided_like(received.view(sent.dtype), kept)
            outgoing = _blocks(sent, rank, size, skip, held)
            yield start_exchange(
                comm,
                [((rank + skip) % size, part) for part in outgoing],
                [((rank - skip) % size, part) for part in terms],
                tag,
            )
            for part, term in zip(kept, terms, strict=True):
                combine_into(part, term, op)
        sent = total
    for summed, out in zip(
        _blocks(total, rank, size, 0, 1),
        _blocks(target, rank, size, 0, 1),
        strict=True,
    ):
        divide_into(summed, divisor, out)
    for skip, held in reversed(rounds_of(size)):
        outgoing = _blocks(target, rank, size, 0, held - skip)
        incoming = _blocks(target, rank, size, skip, held)
        yield start_exchange(
            comm,
            [((rank - skip) % size, part) for part in outgoing],
            [((rank + skip) % size, part) for part in incoming],
            tag,
        )


def _blocks(
    whole: np.ndarray, rank: int, size: int, begin: int, end: int
) -> list[np.ndarray]:
    """Return blocks ``range(begin, end)`` of an array, where the rank's own one is block 0.

    The last block of the array is followed by its first one: they are then two slices.
    """
    start = whole.size * (rank + begin) // size
    stop = whole.size * (rank + end) // size
    if start >= whole.size:
        return [whole[start - whole.size : stop - whole.size]]
    if stop <= whole.size:
        return [whole[start:stop]]
    return [whole[start:], whole[: stop - whole.size]]


def _divided_like(memory: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Return slices of the memory, one after the other, as long as these parts."""
    ends = accumulate([part.size for part in parts], initial=0)
    return [memory[start:stop] for start, stop in pairwise(ends)]
