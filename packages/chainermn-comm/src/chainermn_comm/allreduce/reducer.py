"""What takes the mean of gradients over ranks, and the one that does so straight through MPI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ..arrays import accumulator
from .buckets import Chunk, cut
from .float16 import convert
from .summation import telling_of_overflow
from .transport import Transport
from .wire_format import heading_of, largest_of, scaled

# A packed chunk: long enough that MPI's latency doesn't count, short enough to stay in cache.
CHUNK_BYTES = 1 << 20


class Reducer(ABC):
    """Takes the mean of a list of arrays over ranks. All methods are collective."""

    @abstractmethod
    def mean(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> None:
        """Write the mean over ranks of each source into its target.

        What travels together follows from what ranks agree on (sizes, dtypes, ``wires``), never
        from how an array happens to lie in one rank's memory. Beside sources and targets this
        takes a few chunks, and a copy of each source that is not C-contiguous.

        Args:
            sources: arrays of any layout; equal shapes and dtypes on all ranks.
            targets: C-contiguous arrays of the same shapes and dtypes; a target may be its source.
            wires: the dtype in which each array travels.
        """

    def begin(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> Callable[[], None]:
        """Do the part of :meth:`mean` that comes before ranks first meet (not collective).

        Args:
            sources: as for :meth:`mean`, like the others.
            targets: nothing is written to them yet.
            wires: likewise.

        Returns:
            Does the rest (collective); to be called when all ranks have begun alike and have met
            since, or not at all.
        """
        return partial(self.mean, sources, targets, wires)

    def close(self) -> None:  # noqa: B027  (optional: a reducer may own nothing)
        """Release what the reducer owns."""

    def abandon(self) -> None:  # noqa: B027  (likewise)
        """Release what needs no other rank, and tell those that wait for this (not collective)."""


class Direct(Reducer):
    """All ranks exchange with all, array by array or packed into chunks."""

    def __init__(
        self,
        transport: Transport,
        batched: bool,
        chunk_bytes: int | None = None,
        lag: int = 0,
    ) -> None:
        """Use ``transport``, which stays the caller's.

        Args:
            transport: among all ranks.
            batched: whether small arrays are packed together.
            chunk_bytes: of packed arrays.
            lag: see :meth:`Transport.allreduce`.
        """
        self._lag = lag
        self._transport = transport
        self._batched = batched
        self._chunk_bytes = chunk_bytes or CHUNK_BYTES

    def mean(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> None:
        whole: list[int] = []
        packed: list[int] = []
        for index, (target, wire) in enumerate(zip(targets, wires, strict=True)):
            small = self._batched and target.nbytes < CHUNK_BYTES
            (packed if small or wire != target.dtype else whole).append(index)
        for index in whole:
            if targets[index] is not sources[index]:
                targets[index][...] = sources[index]
        with telling_of_overflow():
            flats = [targets[index].reshape(-1) for index in whole]
            self._transport.allreduce(flats, self._transport.size, self._lag)
            for members in [packed] if self._batched else [[index] for index in packed]:
                self._mean_packed(
                    [sources[i] for i in members],
                    [targets[i] for i in members],
                    [wires[i] for i in members],
                )

    def _mean_packed(
        self, sources: list[np.ndarray], targets: list[np.ndarray], wires: list[np.dtype]
    ) -> None:
        inputs = [source.reshape(-1) for source in sources]
        outputs = [target.reshape(-1) for target in targets]
        for chunk in cut(tuple(flat.size for flat in outputs), tuple(wires), self._chunk_bytes):
            own = {outputs[index].dtype for index, _, _ in chunk.parts}
            if own != {chunk.dtype} and accumulator(chunk.dtype) != chunk.dtype:
                self._mean_narrowed(chunk, inputs, outputs)
                continue
            buffer = np.empty(chunk.size, chunk.dtype)
            chunk.pack(inputs, buffer)
            self._transport.allreduce([buffer], self._transport.size)
            chunk.unpack(buffer, outputs)

    def _mean_narrowed(
        self, chunk: Chunk, inputs: list[np.ndarray], outputs: list[np.ndarray]
    ) -> None:
        """Of numbers that a 16-bit dtype may not hold, though it holds their mean."""
        wide = np.empty(chunk.size, accumulator(chunk.dtype))
        chunk.pack(inputs, wide)
        # A sum of all ranks' largest bounds each number, and also any sum of them.
        bound = np.array([largest_of(wide, chunk.dtype)])
        self._transport.allreduce([bound])
        heading = heading_of(float(bound[0]), 0, chunk.dtype)
        scaled(wide, -heading.exponent, wide)
        travelling = wide
        if heading.dtype != wide.dtype:
            travelling = np.empty(chunk.size, heading.dtype)
            convert(wide, travelling)
        self._transport.allreduce([travelling], self._transport.size)
        if travelling is not wide:
            convert(travelling, wide)
        scaled(wide, heading.exponent, wide)
        chunk.unpack(wide, outputs)


class BySize(Reducer):
    """Large arrays go one way, all others another."""

    def __init__(self, large: Reducer, others: Reducer, large_bytes: int) -> None:
        """Own both reducers; an array is large from ``large_bytes`` on, if it isn't cast."""
        self._large = large
        self._others = others
        self._large_bytes = large_bytes

    def mean(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> None:
        large = self._which_are_large(targets, wires)
        if not any(large):
            self._others.mean(sources, targets, wires)
            return
        for reducer, which in ((self._large, True), (self._others, False)):
            members = [index for index, is_large in enumerate(large) if is_large == which]
            if members:
                reducer.mean(
                    [sources[index] for index in members],
                    [targets[index] for index in members],
                    [wires[index] for index in members],
                )

    def begin(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> Callable[[], None]:
        if any(self._which_are_large(targets, wires)):
            return super().begin(sources, targets, wires)
        return self._others.begin(sources, targets, wires)

    def _which_are_large(
        self, targets: Sequence[np.ndarray], wires: Sequence[np.dtype]
    ) -> list[bool]:
        sizes = [target.nbytes for target in targets]
        least = self._large_bytes
        if max(sizes, default=0) < least:
            return []
        return [
            size >= least and wire == target.dtype
            for size, target, wire in zip(sizes, targets, wires, strict=True)
        ]

    def close(self) -> None:
        self._large.close()
        self._others.close()


class Nothing(Reducer):
    """Leaves gradients alone, to measure everything else."""

    def mean(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        wires: Sequence[np.dtype],
    ) -> None:
        for source, target in zip(sources, targets, strict=True):
            if target is not source:
                target[...] = source
