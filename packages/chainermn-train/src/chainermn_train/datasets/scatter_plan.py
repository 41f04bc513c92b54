"""A data set divided by given indices into rows of arrays and pickles, one part for each rank."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .shared_arrays import ALIGNMENT, SharedArray, SharedFile
from .subset import IndexedView, SubsetVisitor, subset

# Blocks of this size and more are written equally fast; smaller ones stay in the cache until then.
BLOCK_BYTES = 1 << 20


class ArraySlice(NamedTuple):
    """The rows of an array that one rank gets: ``source[indices]``."""

    target: SharedArray
    source: np.ndarray
    indices: np.ndarray


class ScatterPlan:
    """Each rank's part of a data set, made at the root; its arrays are not filled yet."""

    def __init__(self, dataset: Any, indices: list[np.ndarray], root: int) -> None:
        """Divide a data set: ``indices`` are the int64 indices of each rank's examples."""
        self._root = root
        # The arrays of all parts, and the unsplittable data sets that they refer to, by their
        # `id`. Pickles hold only what is stored here.
        self._persistent_ids: dict[int, tuple[Any, ...]] = {}
        self.unsplittable: list[Any] = []  # the data sets that each part holds whole
        self.parts: list[Any] = []  # the ranks'
        self.nbytes: list[int] = []  # of each rank's shared file; 0 where there are no arrays
        self._slices: list[list[ArraySlice]] = []  # of each rank, in the order of its file
        for mine in indices:
            self._slices.append([])
            self.nbytes.append(0)
            self.parts.append(subset(dataset, mine, SubsetVisitor(self._slice, self._keep)))
        self.nbytes[root] = 0  # its arrays need no file

    def _slice(self, source: np.ndarray, indices: np.ndarray) -> SharedArray:
        for each in self._slices[-1]:
            if each.source is source and each.indices is indices:  # as input and target, say
                return each.target
        shape = len(indices), *source.shape[1:]
        begin = max(self.nbytes[-1], ALIGNMENT)
        target = SharedArray(begin, shape, source.dtype)
        self._persistent_ids[id(target)] = "array", begin, shape, source.dtype
        nbytes = int(np.prod(shape, dtype=np.int64)) * source.dtype.itemsize
        if nbytes:
            self.nbytes[-1] = begin + -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._slices[-1].append(ArraySlice(target, source, indices))
        return target

    def _keep(self, dataset: Any, indices: np.ndarray) -> IndexedView:
        if id(dataset) not in self._persistent_ids:
            self._persistent_ids[id(dataset)] = "unsplittable", len(self.unsplittable)
            self.unsplittable.append(dataset)
        return IndexedView(dataset, indices)

    def pickle_part(self, rank: int) -> np.ndarray:
        """Return a rank's part without its arrays and the unsplittable data sets (uint8, 1-D)."""
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, protocol=5)
        pickler.persistent_ids = self._persistent_ids
        pickler.dump(self.parts[rank])
        return np.frombuffer(buffer.getbuffer(), np.uint8)

    def iter_file(self, rank: int) -> Iterator[np.ndarray]:
        """Yield the contents of a rank's file after its first `ALIGNMENT` bytes (uint8, 1-D)."""
        for each in self._slices[rank]:
            nbytes = 0
            for block in iter_row_chunks(each.source, each.indices):
                nbytes += len(block)
                yield block
            yield np.zeros(-nbytes % ALIGNMENT, np.uint8)

    def fill_own(self) -> None:
        """Copy the rows of the root's own part."""
        for each in self._slices[self._root]:
            each.target.own(each.source[each.indices])


class _Pickler(pickle.Pickler):
    persistent_ids: dict[int, tuple[Any, ...]]

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        return self.persistent_ids.get(id(obj))


class _Unpickler(pickle.Unpickler):
    file: SharedFile | None
    datasets: list[Any]

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        if pid[0] == "array":
            return SharedArray(*pid[1:]).attach(self.file)
        return self.datasets[pid[1]]


def unpickle_part(payload: bytes, file: SharedFile | None, unsplittable: np.ndarray) -> Any:
    """Return what :meth:`ScatterPlan.pickle_part` pickled; ``unsplittable`` is a pickle, too."""
    unpickler = _Unpickler(io.BytesIO(payload))
    unpickler.file = file
    unpickler.datasets = pickle.loads(unsplittable.data) if len(unsplittable) else []
    return unpickler.load()


def iter_row_chunks(source: np.ndarray, indices: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the bytes of the rows ``source[indices]`` (uint8, 1-D), without a copy of them all.

    Each array is overwritten when the next one is asked for. ``source`` has shape (n, ...), any
    memory order and any dtype without Python objects; ``indices`` is int64, each in ``range(n)``.
    """
    row = source[:1].nbytes  # 0 for an empty source too, which has no rows to take
    if not row or not len(indices):
        return
    plain = source.flags.c_contiguous
    # Whatever the dtype, and whether it is aligned: np.take would copy the whole otherwise.
    rows = source.reshape(-1).view(np.uint8).reshape(len(source), row) if plain else source
    in_a_row = indices[-1] - indices[0] == len(indices) - 1 and (np.diff(indices) == 1).all()
    if plain and in_a_row:
        whole = rows[indices[0] : indices[0] + len(indices)].reshape(-1)
        for begin in range(0, len(whole), BLOCK_BYTES):
            yield whole[begin : begin + BLOCK_BYTES]
        return
    count = min(len(indices), max(1, BLOCK_BYTES // row))
    buffer = np.empty((count, *rows.shape[1:]), rows.dtype)
    for begin in range(0, len(indices), count):
        chosen = indices[begin : begin + count]
        block = buffer[: len(chosen)]
        if plain:
            np.take(rows, chosen, axis=0, out=block, mode="clip")  # "raise" would buffer
        else:
            block[...] = rows[chosen]
        yield block.reshape(-1).view(np.uint8)
