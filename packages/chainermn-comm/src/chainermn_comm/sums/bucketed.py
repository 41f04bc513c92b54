"""Sums of many arrays by one sum over all ranks: one by one, or small ones packed together."""

from __future__ import annotations

import numpy as np

from ..layout import Chunk, Operand, plan_chunks
from ..messaging import Algorithm
from ..numbers import (
    absmax_each,
    accumulator,
    cast_into,
    fit_each,
    ldexp_each,
    overflow_errstate,
)
from .pairwise import Allreduce

# A packed chunk: long enough that MPI's latency doesn't count, short enough to stay in
# cache.
PACKED_CHUNK_BYTES = 1 << 20


class Bucketed(Algorithm):
    """Sums arrays where they are; what is small or cast to another dtype is packed into chunks."""

    def __init__(
        self,
        allreduce: Allreduce,
        chunk_bytes: int | None = None,
        per_tensor: bool = False,
    ) -> None:
        """Use ``allreduce`` for every sum; ``per_tensor``, small arrays aren't packed together."""
        self._allreduce = allreduce
        self._per_tensor = per_tensor
        self._chunk_bytes = chunk_bytes or PACKED_CHUNK_BYTES

    def allreduce(self, operand: Operand) -> None:
        pairs, packed = [], []
        for index, (source, target, wire) in enumerate(zip(*operand[:3], strict=True)):
            small = not self._per_tensor and target.nbytes < PACKED_CHUNK_BYTES
            if small or wire != target.dtype:
                packed.append(index)
                continue
            if target is not source and not source.flags.c_contiguous:
                target[...] = source
                source = target
            flat = target.reshape(-1)
            pairs.append((flat if source is target else source.reshape(-1), flat))
        with overflow_errstate():
            self._allreduce(pairs, operand.divisor, operand.op)
            for members in (
                [[index] for index in packed] if self._per_tensor else [packed]
            ):
                self._allreduce_packed(operand.only(members))

    def _allreduce_packed(self, operand: Operand) -> None:
        operand = operand.flattened()
        targets = operand.targets
        sizes = tuple(target.size for target in targets)
        for chunk in plan_chunks(sizes, tuple(operand.wire_dtypes), self._chunk_bytes):
            own = {targets[index].dtype for index, _, _ in chunk.segments}
            if own != {chunk.dtype} and accumulator(chunk.dtype) != chunk.dtype:
                self._mean_narrowed(chunk, operand)
                continue
            buffer = np.empty(chunk.size, chunk.dtype)
            chunk.pack(operand.sources, buffer)
            self._allreduce([(buffer, buffer)], operand.divisor, operand.op)
            chunk.unpack(buffer, targets)

    def _mean_narrowed(self, chunk: Chunk, operand: Operand) -> None:
        """Take the mean of numbers too large or too small for the 16-bit dtype of a message.

        They travel divided by a power of two, or in a wider dtype: see
        :mod:`wire_format`. Each segment has a format of its own, so that its bits don't
        depend on what it is packed with.
        """
        wide = np.empty(chunk.size, accumulator(chunk.dtype))
        chunk.pack(operand.sources, wide)
        sizes = [stop - start for _, start, stop in chunk.segments]
        # The sum of all ranks' largest magnitudes bounds each number, and also any sum
        # of them.
        bounds = absmax_each(wide, sizes)
        self._allreduce([(bounds, bounds)], 1, np.add)
        is_own = [
            operand.targets[index].dtype == chunk.dtype
            for index, _, _ in chunk.segments
        ]
        bounds[is_own] = 0  # they travel as they are
        is_narrow, exponents = fit_each(bounds, chunk.dtype)
        ldexp_each(wide, -exponents, sizes)
        for dtype, chosen in ((chunk.dtype, is_narrow), (wide.dtype, ~is_narrow)):
            if chosen.all():
                self._mean_as(dtype, wide, operand.divisor)
            elif chosen.any():
                mask = np.repeat(chosen, sizes)
                terms = wide[mask]
                self._mean_as(dtype, terms, operand.divisor)
                wide[mask] = terms
        ldexp_each(wide, exponents, sizes)
        chunk.unpack(wide, operand.targets)

    def _mean_as(self, dtype: np.dtype, terms: np.ndarray, divisor: int) -> None:
        """Overwrite ``terms`` by their mean, which travels as ``dtype``."""
        wire = terms
        if dtype != terms.dtype:
            wire = np.empty(terms.size, dtype)
            cast_into(terms, wire)
        self._allreduce([(wire, wire)], divisor, np.add)
        if wire is not terms:
            cast_into(wire, terms)
