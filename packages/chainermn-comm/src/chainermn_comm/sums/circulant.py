"""Sums for many ranks, in about log2(ranks) rounds each way.

Reduce-scatter and allgather on a circulant graph: J. L. Träff, "Optimal, Non-pipelined
Reduce-scatter and Allreduce Algorithms", 2024, arXiv:2410.14234. For any number p of
ranks each takes ceil(log2(p)) rounds, in which a rank sends and receives p - 1 of p
blocks in all. Block i is summed on rank i, in an order that follows from p and i. See
docs/decisions/scaling.md.
"""

from __future__ import annotations

from functools import cache
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
    # Arrays are rotated, so that this rank's own block is the first one.
    begin = source.size * rank // size

    def end_of(blocks: int) -> int:
        """Return where so many blocks end, counted from this rank's own one."""
        return source.size * (rank + blocks) // size - begin

    def exchange(
        skip: int, outgoing: np.ndarray, incoming: np.ndarray
    ) -> list[MPI.Request]:
        """Start to send to the rank so many after this one, and to receive from before."""
        receiver = (rank + skip) % size
        sender = (rank - skip) % size
        return start_exchange(comm, [(receiver, outgoing)], [(sender, incoming)], tag)

    sent = np.empty(source.size, source.dtype)  # as narrow as it is
    rotate_into(source, begin, sent)
    result = sent
    total = sent
    if accumulator(sent.dtype) != sent.dtype:
        total = np.empty(sent.size, accumulator(sent.dtype))
        cast_into(sent, total)
    for skip, held in rounds_of(size):
        kept = total[: end_of(held - skip)]
        outgoing = sent[end_of(skip) : end_of(held)]
        with memory.borrowed(kept.size * sent.itemsize) as received:
            term = received.view(sent.dtype)
            yield exchange(skip, outgoing, term)
            combine_into(kept, term, op)
        sent = total
    divide_into(total[: end_of(1)], divisor, result[: end_of(1)])
    for skip, held in reversed(rounds_of(size)):
        outgoing = result[: end_of(held - skip)]
        incoming = result[end_of(skip) : end_of(held)]
        yield exchange(-skip, outgoing, incoming)
    rotate_into(result, result.size - begin, target)


def rotate_into(source: np.ndarray, begin: int, out: np.ndarray) -> None:
    """Write the elements from ``begin`` on, followed by those before, into ``out``."""
    np.concatenate([source[begin:], source[:begin]], out=out)
