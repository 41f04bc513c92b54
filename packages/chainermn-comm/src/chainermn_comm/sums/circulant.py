"""The sum over many ranks by messages, in about log2(ranks) rounds each way.

Reduce-scatter and all-gather on a circulant graph: J. L. Träff, "Optimal, Non-pipelined
Reduce-scatter and Allreduce Algorithms", 2024, arXiv:2410.14234. For any number p of
ranks each takes ceil(log2(p)) rounds, in which a rank sends and receives p - 1 of p
blocks in all. Block i is summed on rank i, in an order that follows from p and i. See
docs/decisions/scaling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from ..layout import shard_slice
from ..messaging import ProcessGroup, start_exchange
from ..numbers import (
    BLOCK_ELEMENTS,
    accumulator,
    bound_of,
    cast_into,
    ldexp_into,
    sum_rows,
)
from ..runtime import are_done, wait_any
from .pairwise import Pair

# Most ranks that exchange pairwise, which keeps the order of ranks and takes two
# rounds.
PAIRWISE_RANKS = 16
# A chunk has BYTES_PER_ROUND for each round each way, so that neither latency nor
# Python's time counts beside them; what has few such chunks is divided into shorter
# ones, whose rounds overlap. See docs/decisions/scaling.md.
BYTES_PER_ROUND, LEAST_BYTES_PER_ROUND, ENOUGH_CHUNKS = 512 << 10, 128 << 10, 8
# The exponent of numbers, whether they have the wire's dtype, and the largest bound of
# the formats of all ranks whose terms they hold: in the end of all.
HEADER = struct.Struct("=qqd")
HEADER_BYTES = HEADER.size


def goes_in_rounds(size: int) -> bool:
    """Return whether sums over ``size`` ranks are taken here, and not pairwise."""
    return size > PAIRWISE_RANKS


@cache
def skips(size: int) -> tuple[tuple[int, int], ...]:
    """Return for each round the distance to the peer, and the number of blocks held before it."""
    found, held = [], size
    while held > 1:
        found.append((-(-held // 2), held))
        held = -(-held // 2)
    return tuple(found)


def default_chunk_bytes(size: int) -> int:
    """Return the most bytes that are summed over ``size`` ranks at a time."""
    return max(1, len(skips(size))) * BYTES_PER_ROUND


@dataclass(frozen=True)
class ScaledArray:
    """Contiguous numbers, divided by 2**exponent; 1-D.

    They are looked at from ``start`` on, and after the end from the beginning.
    """

    array: np.ndarray
    exponent: int = 0
    start: int = 0

    def parts(self, begin: int, end: int) -> list[np.ndarray]:
        """Return elements ``range(begin, end)``, counted from ``start``, as one or two slices."""
        size = self.array.size
        begin, end = begin + self.start, end + self.start
        if begin >= size:
            begin, end = begin - size, end - size
        if end <= size:
            return [self.array[begin:end]]
        return [self.array[begin:], self.array[: end - size]]


class InFlight:
    """A sum in progress."""

    def __init__(self, steps: Iterator[list[MPI.Request]]) -> None:
        self._steps = steps
        self.rounds, self.is_over = 0, False  # how many are done; whether all are
        self.requests = next(steps)  # of the present round, for the caller to wait for

    def advance(self) -> None:
        """Begin the next round; the requests must be done."""
        following = next(self._steps, None)
        self.rounds += 1
        self.requests, self.is_over = following or [], following is None


class CirculantSum:
    """One rank's part in sums over the ranks of an mpi4py communicator.

    Several may be in progress. Rounds have memory, which sums use one after the other.
    So one may end a round only if the sum begun before it is over or has done two
    rounds more, and may begin only if the last but one has done a round.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int = 0) -> None:
        """Use ``comm``, which stays the caller's; no other messages have ``tag`` or the next.

        Not collective.
        """
        self._comm, self._tag = comm, tag
        self._begun = 0
        # Memory by its use and round.
        self._memory: dict[tuple[str, int], np.ndarray] = {}

    def begin(
        self,
        sent: ScaledArray,
        own: ScaledArray,
        out: Callable[[float], ScaledArray],
        dtype: np.dtype,
        divisor: float,
        op: np.ufunc = np.add,
    ) -> InFlight:
        """Begin the sum of one chunk, or its maximum or minimum.

        ``sent`` is this rank's term as the others get it, of ``dtype`` or that in which
        it is accumulated, and ``own`` as this rank adds it; they stay until the first
        round has ended. ``out`` returns, from the largest :func:`bound_of` the ranks'
        terms, where the sum goes, divided before it is rounded (floats only), perhaps
        the terms' memory. All three are of one length on all ranks. Partial sums that
        overflow are divided by a power of two; that is noticed only within
        :func:`overflow_errstate`.
        """
        self._begun += 1

        def rounds() -> Iterator[list[MPI.Request]]:
            first, _ = self._offsets(own.array.size)
            block, bound = yield from self._scatter(sent, own, dtype, op)
            found = out(bound)
            place = found.array[first : first + block.array.size]
            sum_rows(
                [block.array], place, divisor * 2.0 ** (found.exponent - block.exponent)
            )
            yield from self._gather(found.array)

        return InFlight(rounds())

    def _scatter(
        self, sent: ScaledArray, own: ScaledArray, narrow: np.dtype, op: np.ufunc
    ) -> Generator[list[MPI.Request], None, tuple[ScaledArray, float]]:
        """Return the sum of this rank's block, and the largest bound."""
        rank, size = self._comm.rank, self._comm.size
        wide = accumulator(narrow)
        bound = bound_of(sent.exponent, sent.array.dtype == narrow)
        first, offset = self._offsets(own.array.size)
        sent, own = (
            ScaledArray(each.array, each.exponent, first) for each in (sent, own)
        )
        memory = np.empty(0, np.uint8)  # of own numbers, after the first round
        for index, (skip, held) in enumerate(skips(size)):
            summed, begin, end = offset(held - skip), offset(skip), offset(held)
            # Both sides divide the blocks alike: where the whole array ends.
            places = [part.size for part in own.parts(0, summed)]
            received = self._room(
                "received", index, summed * wide.itemsize + HEADER_BYTES
            )
            if index == 0:
                header = np.empty(HEADER_BYTES, np.uint8)
                HEADER.pack_into(
                    header.data, 0, sent.exponent, sent.array.dtype != wide, bound
                )
                outgoing = [header, *sent.parts(begin, end)]
                got = np.empty(HEADER_BYTES, np.uint8)
                cut = places[0] * wide.itemsize
                incoming = [got, received[:cut], received[cut:-HEADER_BYTES]][
                    : 1 + len(places)
                ]
            else:  # the header follows the numbers
                outgoing = [memory[begin * wide.itemsize :]]
                incoming = [received]
            yield start_exchange(
                self._comm,
                [((rank + skip) % size, each) for each in outgoing],
                [((rank - skip) % size, each) for each in incoming],
                self._tag,
            )
            if index:
                incoming = [received[-HEADER_BYTES:], received[:-HEADER_BYTES]]
            exponent, is_narrow, other = HEADER.unpack_from(incoming[0].data)
            bound = max(bound, other)
            dtype = narrow if is_narrow else wide
            terms = [
                each.view(dtype)[:n]
                for each, n in zip(incoming[1:], places, strict=True)
            ]
            memory = self._room("sums", index, begin * wide.itemsize + HEADER_BYTES)
            total = memory[:-HEADER_BYTES].view(wide)
            own = ScaledArray(total, _sum(own, terms, exponent, total, op))
            HEADER.pack_into(
                memory.data, memory.size - HEADER_BYTES, own.exponent, False, bound
            )
        return own, bound

    def _gather(self, out: np.ndarray) -> Iterator[list[MPI.Request]]:
        """Send this rank's block to all others, and receive theirs."""
        rank, size = self._comm.rank, self._comm.size
        first, offset = self._offsets(out.size)
        whole = ScaledArray(out, 0, first)
        for skip, held in reversed(skips(size)):
            outgoing = whole.parts(0, offset(held - skip))
            incoming = whole.parts(offset(skip), offset(held))
            yield start_exchange(
                self._comm,
                [((rank - skip) % size, each) for each in outgoing],
                [((rank + skip) % size, each) for each in incoming],
                self._tag + 1,
            )

    def _offsets(self, elements: int) -> tuple[int, Callable[[int], int]]:
        """Return where this rank's block begins, and the elements in a number of blocks from it on.

        Blocks are nearly equal, and those of the ranks after this one follow its own.
        """
        rank, size = self._comm.rank, self._comm.size
        first = elements * rank // size
        return first, lambda blocks: elements * (rank + blocks) // size - first

    def _room(self, use: str, index: int, nbytes: int) -> np.ndarray:
        """Return memory of a round's numbers, which the next sum uses when this one has not to."""
        # The next sum begins before the first round of the one before has ended.
        turn = self._begun % 2 if use == "received" and index == 0 else 0
        key = use, 2 * index + turn
        found = self._memory.get(key)
        if found is None or found.nbytes < nbytes:
            found = self._memory[key] = np.empty(nbytes, np.uint8)
        return found[:nbytes]


class CirculantAllreduce:
    """What :class:`PairwiseAllreduce` does, for many ranks: chunk after chunk, all under way."""

    def __init__(self, group: ProcessGroup) -> None:
        """See :class:`PairwiseAllreduce` (not collective)."""
        size, chunk_bytes = group.size, group.settings.chunk_bytes
        self._chunk_bytes = chunk_bytes or default_chunk_bytes(size)
        self._least_bytes = chunk_bytes or len(skips(size)) * LEAST_BYTES_PER_ROUND
        self._sum = CirculantSum(group.comm, group.tag)

    def allreduce(
        self, pairs: Sequence[Pair], divisor: int = 1, op: np.ufunc = np.add
    ) -> None:
        """Sum as :meth:`PairwiseAllreduce.allreduce` does (collective)."""
        todo = iter([pair for pair in pairs if pair[0].size])
        self.stream(lambda _: next(todo, None), divisor, op)

    def stream(
        self,
        next_pair: Callable[[bool], Pair | None],
        divisor: int,
        op: np.ufunc = np.add,
    ) -> None:
        """Sum as :meth:`PairwiseAllreduce.stream` does (collective)."""
        chunks: Iterator[Pair] = iter(())
        in_flight: list[InFlight] = []  # the oldest first
        while True:
            chunk = None
            if len(in_flight) < 2 or in_flight[-2].rounds:
                chunk = next(chunks, None)
                while chunk is None and (pair := next_pair(not in_flight)) is not None:
                    chunks = self._chunks(pair)
                    chunk = next(chunks, None)
            if chunk is not None:  # on its way while others are waited for
                term, out = map(ScaledArray, chunk)
                dtype, whole = chunk[1].dtype, lambda _, out=out: out
                in_flight.append(self._sum.begin(term, term, whole, dtype, divisor, op))
            elif not in_flight:
                return
            # None is waited for alone: another rank may not have its buffer yet.
            able = in_flight[:1] + [
                each
                for older, each in pairwise(in_flight)
                if older.rounds >= each.rounds + 2
            ]
            done = [each for each in able if are_done(each.requests)]
            if not done and chunk is None:
                wait_any([request for each in able for request in each.requests])
            for each in done:
                each.advance()
            in_flight = [each for each in in_flight if not each.is_over]

    def _chunks(self, pair: Pair) -> Iterator[Pair]:
        """Yield nearly equal parts of a pair."""
        source, target = pair
        few = min(ENOUGH_CHUNKS, source.nbytes // max(1, self._least_bytes))
        parts = max(few, -(-source.nbytes // self._chunk_bytes))
        for part in range(parts):
            chunk = shard_slice(source.size, parts, part)
            yield source[chunk], target[chunk]


def _sum(
    own: ScaledArray,
    terms: list[np.ndarray],
    exponent: int,
    out: np.ndarray,
    op: np.ufunc,
) -> int:
    """Write own numbers and ``terms`` added, then the rest, into ``out``; return its exponent.

    ``exponent`` is that of ``terms``, which are as long as the slices of ``own``.
    """
    common, summed = max(own.exponent, exponent), sum(term.size for term in terms)
    added = own.parts(0, summed)
    rest = own.parts(summed, out.size)  # a block, where their number is odd
    while True:
        shifts = own.exponent - common, exponent - common
        try:
            done = 0
            for mine, term in zip(added, terms, strict=True):
                _add(mine, term, shifts, out[done : done + mine.size], op)
                done += mine.size
            for mine in rest:
                _scale_into(mine, shifts[0], out[done : done + mine.size])
                done += mine.size
        except FloatingPointError:
            # Halves of numbers that are in range have a sum in range.
            common += 1
        else:
            return common


def _add(
    mine: np.ndarray,
    term: np.ndarray,
    shifts: tuple[int, int],
    out: np.ndarray,
    op: np.ufunc,
) -> None:
    if mine.dtype == term.dtype == out.dtype and shifts == (0, 0):
        op(mine, term, out=out)
        return
    for start in range(0, out.size, BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        op(
            _scaled(mine[block], shifts[0]),
            _scaled(term[block], shifts[1]),
            out=out[block],
        )


def _scaled(numbers: np.ndarray, exponent: int) -> np.ndarray:
    """Return ``numbers * 2**exponent`` in the dtype in which they are accumulated."""
    if not exponent and numbers.dtype == accumulator(numbers.dtype):
        return numbers
    out = np.empty(numbers.size, accumulator(numbers.dtype))
    _scale_into(numbers, exponent, out)
    return out


def _scale_into(numbers: np.ndarray, exponent: int, out: np.ndarray) -> None:
    cast_into(numbers, out)
    if exponent:
        ldexp_into(out, exponent, out)
