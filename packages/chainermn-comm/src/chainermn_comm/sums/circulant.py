"""Sums for many ranks, in about log2(ranks) rounds each way.

Reduce-scatter and allgather on a circulant graph: J. L. Träff, "Optimal, Non-pipelined
Reduce-scatter and Allreduce Algorithms", 2024, arXiv:2410.14234. For any number p of
ranks each takes ceil(log2(p)) rounds, in which a rank sends and receives p - 1 of p
blocks in all. Block i is summed on rank i, in an order that follows from p and i. See
docs/decisions/sums.md.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from mpi4py import MPI

from ..messaging import start_exchange
from ..numbers import accumulator, cast_into, combine_into, divide_into
from .rounds import ReceiveMemory, Rounds


@cache
def rounds_of(size: int) -> list[tuple[int, int]]:
    """Return the rounds of a reduce-scatter over ``size`` ranks, as pairs.

    A rank counts blocks from its own block on. The first number of a round is the distance
    to the peer, and the number of the first block that is sent there. The second is the
    number of blocks before the round.
    """
    found = []
    blocks = size
    while blocks > 1:
        skip = -(-blocks // 2)
        found.append((skip, blocks))
        blocks = skip
    return found


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
    length = source.size

    def parts(array: np.ndarray, first: int, stop: int) -> list[np.ndarray]:
        """Return the array's one or two slices that have these blocks.

        The blocks are ``first`` to ``stop - 1``, counted from this rank's own block.
        """
        first += rank
        stop += rank
        if first >= size:
            first -= size
            stop -= size
        begin = length * first // size
        end = length * stop // size
        if stop <= size:
            return [array[begin:end]]
        return [array[begin:], array[: end - length]]

    def exchange(
        skip: int, outgoing: list[np.ndarray], incoming: list[np.ndarray]
    ) -> list[MPI.Request]:
        """Start to send to the rank ``skip`` after this one, and to receive from the one before."""
        receiver = (rank + skip) % size
        sender = (rank - skip) % size
        sent = [(receiver, part) for part in outgoing]
        received = [(sender, part) for part in incoming]
        return start_exchange(comm, sent, received, tag)

    total = target
    if accumulator(source.dtype) != source.dtype:
        total = np.empty(length, accumulator(source.dtype))
    if total is not source:
        cast_into(source, total)
    sent = source  # without widening
    for skip, blocks in rounds_of(size):
        kept = parts(total, 0, blocks - skip)
        sizes = [part.size for part in kept]
        with memory.borrowed(sum(sizes) * sent.itemsize) as received:
            terms = np.split(received.view(sent.dtype), sizes[:-1])
            yield exchange(skip, parts(sent, skip, blocks), terms)
            for part, term in zip(kept, terms, strict=True):
                combine_into(part, term, op)
        sent = total
    (own,) = parts(total, 0, 1)
    divide_into(own, divisor, *parts(target, 0, 1))
    for skip, blocks in reversed(rounds_of(size)):
        outgoing = parts(target, 0, blocks - skip)
        yield exchange(-skip, outgoing, parts(target, skip, blocks))
