"""Means of gradients by one sum over all ranks: array by array, or small arrays packed together."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import accumulator
from .algorithm import Algorithm, Arrays, Dtypes
from .casts import cast_into
from .chunks import Chunk, plan_chunks
from .pairwise import Allreduce
from .summation import overflow_errstate
from .wire_format import absmax_each, fit_each, ldexp_each

# A packed chunk: long enough that MPI's latency doesn't count, short enough to stay in cache.
PACKED_CHUNK_BYTES = 1 << 20


class Bucketed(Algorithm):
    """Sums arrays where they are; what is small or cast to another dtype is packed into chunks."""

    def __init__(
        self,
        allreduce: Allreduce,
        size: int,
        chunk_bytes: int | None = None,
        per_tensor: bool = False,
    ) -> None:
        """Use ``allreduce`` for every sum over ``size`` ranks.

        ``per_tensor``, small arrays aren't packed together.
        """
        self._size = size
        self._allreduce = allreduce
        self._per_tensor = per_tensor
        self._chunk_bytes = chunk_bytes or PACKED_CHUNK_BYTES

    def mean(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        whole: list[int] = []
        packed: list[int] = []
        for index, (target, wire) in enumerate(zip(targets, wire_dtypes, strict=True)):
            small = not self._per_tensor and target.nbytes < PACKED_CHUNK_BYTES
            (packed if small or wire != target.dtype else whole).append(index)
        for index in whole:
            if targets[index] is not sources[index]:
                targets[index][...] = sources[index]
        with overflow_errstate():
            self._allreduce([targets[index].reshape(-1) for index in whole], self._size)
            for members in [[index] for index in packed] if self._per_tensor else [packed]:
                every: list[Any] = [sources, targets, wire_dtypes]
                self._mean_packed(*[[each[index] for index in members] for each in every])

    def _mean_packed(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        inputs = [source.reshape(-1) for source in sources]
        outputs = [target.reshape(-1) for target in targets]
        sizes = tuple(flat.size for flat in outputs)
        for chunk in plan_chunks(sizes, tuple(wire_dtypes), self._chunk_bytes):
            own = {outputs[index].dtype for index, _, _ in chunk.segments}
            if own != {chunk.dtype} and accumulator(chunk.dtype) != chunk.dtype:
                self._mean_narrowed(chunk, inputs, outputs)
                continue
            buffer = np.empty(chunk.size, chunk.dtype)
            chunk.pack(inputs, buffer)
            self._allreduce([buffer], self._size)
            chunk.unpack(buffer, outputs)

    def _mean_narrowed(self, chunk: Chunk, inputs: Arrays, outputs: Arrays) -> None:
        """Take the mean of numbers too large or too small for the 16-bit dtype of a message.

        They travel divided by a power of two, or in a wider dtype: see :mod:`wire_format`. Each
        segment has a format of its own, so that its bits don't depend on what it is packed with.
        """
        wide = np.empty(chunk.size, accumulator(chunk.dtype))
        chunk.pack(inputs, wide)
        sizes = [stop - start for _, start, stop in chunk.segments]
        # The sum of all ranks' largest magnitudes bounds each number, and also any sum of them.
        bounds = absmax_each(wide, sizes)
        self._allreduce([bounds], 1)
        is_own = [outputs[index].dtype == chunk.dtype for index, _, _ in chunk.segments]
        bounds[is_own] = 0  # they travel as they are
        is_narrow, exponents = fit_each(bounds, chunk.dtype)
        ldexp_each(wide, -exponents, sizes)
        for dtype, chosen in ((chunk.dtype, is_narrow), (wide.dtype, ~is_narrow)):
            if chosen.all():
                self._mean_as(dtype, wide)
            elif chosen.any():
                mask = np.repeat(chosen, sizes)
                terms = wide[mask]
                self._mean_as(dtype, terms)
                wide[mask] = terms
        ldexp_each(wide, exponents, sizes)
        chunk.unpack(wide, outputs)

    def _mean_as(self, dtype: np.dtype, terms: np.ndarray) -> None:
        """Overwrite ``terms`` by their mean, which travels as ``dtype``."""
        wire = terms
        if dtype != terms.dtype:
            wire = np.empty(terms.size, dtype)
            cast_into(terms, wire)
        self._allreduce([wire], self._size)
        if wire is not terms:
            cast_into(wire, terms)
