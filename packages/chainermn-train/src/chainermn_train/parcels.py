"""What each rank gets of a data set: its examples, and how they are turned into bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from .parts import Leaves, Selection, take
from .rows import blocks
from .shared_arrays import ALIGNMENT, SharedArray, SharedFile


class Parcels:
    """What the root deals: each rank's part, whose arrays are not filled yet."""

    def __init__(self, dataset: Any, indices: list[np.ndarray], own: int) -> None:
        """Take a data set apart.

        Args:
            dataset: any data set.
            indices: for each rank the int64 indices of its examples.
            own: the rank of this process, whose arrays need no file.
        """
        self._own = own
        # The arrays of all parts, and the opaque data sets that they refer to, by their `id`.
        # In pickles they are only named, by what is kept here.
        self.external: dict[int, tuple[Any, ...]] = {}
        self.opaque: list[Any] = []
        self.parts: list[Any] = []
        # For each rank: the arrays of its file, where their rows come from, and its length.
        self.rows: list[list[tuple[SharedArray, np.ndarray, np.ndarray]]] = []
        self.nbytes: list[int] = []
        for mine in indices:
            self.rows.append([])
            self.nbytes.append(0)
            self.parts.append(take(dataset, mine, Leaves(self._place, self._keep)))
        self.nbytes[own] = 0

    def _place(self, source: np.ndarray, indices: np.ndarray) -> SharedArray:
        for array, *origin in self.rows[-1]:
            if origin[0] is source and origin[1] is indices:  # as input and target, say
                return array
        shape = len(indices), *source.shape[1:]
        begin = max(self.nbytes[-1], ALIGNMENT)
        array = SharedArray(begin, shape, source.dtype)
        self.external[id(array)] = "rows", begin, shape, source.dtype
        nbytes = int(np.prod(shape, dtype=np.int64)) * source.dtype.itemsize
        if nbytes:
            self.nbytes[-1] = begin + -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.rows[-1].append((array, source, indices))
        return array

    def _keep(self, dataset: Any, indices: np.ndarray) -> Selection:
        if id(dataset) not in self.external:
            self.external[id(dataset)] = "opaque", len(self.opaque)
            self.opaque.append(dataset)
        return Selection(dataset, indices)

    def pickled(self, rank: int, file: SharedFile | None) -> np.ndarray:
        """A rank's part (uint8, 1-D), without what it finds in a file or shares with others.

        Args:
            rank: the rank.
            file: which holds its arrays; None if it has made that itself, or needs none.
        """
        buffer = io.BytesIO()
        pickle.dump(None if file is None else file.address, buffer)
        _Pickler(buffer, self.external).dump(self.parts[rank])
        return np.frombuffer(buffer.getbuffer(), np.uint8)

    def contents(self, rank: int) -> Iterator[np.ndarray]:
        """What belongs into a rank's file after its first `ALIGNMENT` bytes (uint8, 1-D)."""
        for _, source, indices in self.rows[rank]:
            nbytes = 0
            for block in blocks(source, indices):
                nbytes += len(block)
                yield block
            yield np.zeros(-nbytes % ALIGNMENT, np.uint8)

    def fill_own(self) -> None:
        """Copy the rows of this process's own part."""
        for array, source, indices in self.rows[self._own]:
            array.hold(source[indices])


class _Pickler(pickle.Pickler):
    """Only names the objects whose ``id`` is in ``external``."""

    def __init__(self, file: io.BytesIO, external: dict[int, tuple[Any, ...]]) -> None:
        super().__init__(file, protocol=5)
        self._external = external

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        return self._external.get(id(obj))


class _Unpickler(pickle.Unpickler):
    """Puts in what `_Pickler` only named."""

    def __init__(self, stream: io.BytesIO, file: SharedFile | None, opaque: list[Any]) -> None:
        super().__init__(stream)
        self._file = file
        self._opaque = opaque

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        if pid[0] == "rows":
            return SharedArray(*pid[1:]).attach(self._file)
        return self._opaque[pid[1]]


def dumps(dataset: Any) -> np.ndarray:
    """An opaque data set as bytes (uint8, 1-D)."""
    return np.frombuffer(pickle.dumps(dataset, protocol=5), np.uint8)


def loads(payload: np.ndarray, file: SharedFile | None, opaque: list[np.ndarray]) -> Any:
    """The part of which `Parcels.pickled` made ``payload``.

    Args:
        payload: uint8, 1-D.
        file: with its arrays; None if the payload says where they are, or there are none.
        opaque: what `dumps` made of each of `Parcels.opaque`.
    """
    stream = io.BytesIO(payload.data)
    address = pickle.load(stream)
    if address is not None:
        file = SharedFile.at(address)
    return _Unpickler(stream, file, [pickle.loads(each.data) for each in opaque]).load()
