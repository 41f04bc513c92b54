"""Sums of many arrays by messages among all ranks: large arrays in place, small arrays packed."""

from __future__ import annotations

import numpy as np

from ..layout import Chunk, Operand, plan_chunks
from ..messaging import Algorithm
from . import rounds
from .message_sum import Sum
from .rounds import Rounds
from .sixteen_bits import with_exponents


class ChunkedSum(Algorithm):
    """Divides arrays into chunks; copies small arrays, and arrays to be cast, into buffers."""

    def __init__(
        self,
        take_sum: Sum,
        chunk_bytes: int = 4 << 20,
        at_once: int = 1,
        packs: bool = True,
    ) -> None:
        """Sum each chunk by ``take_sum``, and ``at_once`` chunks at the same time.

        Unless it ``packs``, small arrays aren't packed together.
        """
        self._take_sum = take_sum
        self._chunk_bytes = chunk_bytes
        self._at_once = at_once
        self._packs = packs

    def allreduce(self, operand: Operand) -> None:
        flat = with_exponents(self, operand.flattened())
        sizes = tuple([target.size for target in flat.targets])
        dtypes = tuple(flat.wire_dtypes)
        chunks = plan_chunks(sizes, dtypes, self._chunk_bytes, self._packs)
        sums = (self._sum(flat, chunk) for chunk in chunks)
        with np.errstate(all="ignore"):
            rounds.run(sums, self._at_once)

    def _sum(self, operand: Operand, chunk: Chunk) -> Rounds:
        divisor = operand.divisor
        op = operand.op
        views = chunk.in_place(operand)
        if views is not None:
            source, target = views
            yield from self._take_sum(source, target, divisor, op)
            return
        buffer = np.empty(chunk.size, chunk.dtype)
        chunk.pack(operand, buffer)
        yield from self._take_sum(buffer, buffer, divisor, op)
        chunk.unpack(buffer, operand)
