"""Sums for few ranks: each rank sums a shard of all ranks' numbers, and sends the sums to all.

MPI's own reduction promises neither the order of a sum nor 16-bit types. As many bytes
are moved as by a ring allreduce (Patarasuk and Yuan, 2009). See docs/decisions/sums.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from mpi4py import MPI

from ..layout import shard_slice
from ..messaging import Buffer, start_exchange
from ..numbers import sum_rows
from ..runtime import wait_all
from .rounds import ReceiveMemory, Rounds

# If a rank receives at most this number of bytes, every rank gathers whole buffers and
# sums them all: this takes one exchange, while shards take two.
GATHER_BYTES = 256 << 10
# The most bytes of a shard when ranks keep the sums of their own shards.
SHARD_BYTES = 2 << 20


def pairwise_rounds(
    comm: MPI.Intracomm,
    tag: int,
    memory: ReceiveMemory,
    source: np.ndarray,
    target: np.ndarray,
    divisor: int,
    op: np.ufunc,
) -> Rounds:
    """Write the sum of ``source`` over ranks, in rank order and divided, to ``target``.

    Both are 1-D and contiguous, with one dtype, and equally long on all ranks. They may be
    the same array.
    """
    if comm.size == divisor == 1 and source is target:
        return
    if (comm.size - 1) * source.nbytes <= GATHER_BYTES:
        with memory.borrowed((comm.size - 1) * source.nbytes) as received:
            rows = _rows(received, source, comm)
            yield _start_exchange(comm, [source] * comm.size, rows, tag)
            sum_rows(rows, target, divisor, op)
        return
    terms = _shards(source, comm.size)
    sums = _shards(target, comm.size)
    own = sums[comm.rank]
    with memory.borrowed((comm.size - 1) * own.nbytes) as received:
        rows = _rows(received, terms[comm.rank], comm)
        yield _start_exchange(comm, terms, rows, tag)
        sum_rows(rows, own, divisor, op)
    yield _start_exchange(comm, [own] * comm.size, sums, tag)


def reduce_scatter(
    comm: MPI.Intracomm,
    tag: int,
    sources: Sequence[np.ndarray],
    target: np.ndarray,
    op: np.ufunc = np.add,
) -> None:
    """Write the sum over ranks of their ``sources[rank]``, or the maximum, to ``target``.

    Collective. Arrays are 1-D and contiguous. On all ranks, the sources for a rank have the
    length and dtype of its target.
    """
    memory = ReceiveMemory()
    widest = max(source.itemsize for source in sources)
    step = max(1, SHARD_BYTES // widest)
    for start in range(0, max(source.size for source in sources), step):
        terms = [source[start : start + step] for source in sources]
        own = terms[comm.rank]
        with memory.borrowed((comm.size - 1) * own.nbytes) as received:
            rows = _rows(received, own, comm)
            wait_all(_start_exchange(comm, terms, rows, tag))
            with np.errstate(all="ignore"):
                sum_rows(rows, target[start : start + step], op=op)


def _shards(whole: np.ndarray, size: int) -> list[np.ndarray]:
    return [whole[shard_slice(whole.size, size, rank)] for rank in range(size)]


def _rows(
    received: np.ndarray, own: np.ndarray, comm: MPI.Intracomm
) -> list[np.ndarray]:
    """Return an array like ``own`` for each other rank, with ``own`` in this rank's place."""
    rows = list(received.view(own.dtype).reshape(comm.size - 1, own.size))
    rows.insert(comm.rank, own)
    return rows


def _start_exchange(
    comm: MPI.Intracomm, sent: Sequence[Buffer], received: Sequence[Buffer], tag: int
) -> list[MPI.Request]:
    """Start to send the i-th buffer to rank i, and to receive the i-th target from rank i."""
    outgoing = _others(comm, sent, 1)
    incoming = _others(comm, received, -1)
    return start_exchange(comm, outgoing, incoming, tag)


def _others(
    comm: MPI.Intracomm, buffers: Sequence[Buffer], step: int
) -> Iterator[tuple[int, Buffer]]:
    """Yield the other ranks' buffers, so that no two ranks have the same rank at the same step."""
    for distance in range(1, comm.size):
        rank = (comm.rank + step * distance) % comm.size
        yield rank, buffers[rank]
