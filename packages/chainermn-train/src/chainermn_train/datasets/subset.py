"""Subsets of data sets that hold the chosen examples, and nothing of the others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from chainer.dataset import DatasetMixin
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    ImageDataset,
    LabeledImageDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)

from .shared_arrays import SharedArray


class IndexedView(DatasetMixin):
    """The examples of ``dataset`` at ``indices``."""

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self._dataset = dataset
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def get_example(self, i: int) -> Any:
        return self._dataset[int(self._indices[i])]


# Returns what stands for an array's rows at int64 indices; of any dtype but object.
TakeRows = Callable[[np.ndarray, np.ndarray], Any]
_Splitter = Callable[[Any, np.ndarray, TakeRows], Any]


def subset(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    """Return a data set of the examples at ``indices`` (int64, shape (n,)), in that order.

    What is in _SPLITTERS is divided, and subclasses of Chainer's data sets there that
    find examples as these do: arrays as arrays, paths as paths; nothing is computed or
    read. Any other data set is unsplittable; the result holds the whole of it.
    """
    cls = type(dataset)
    if cls in _SPLITTERS:
        return _SPLITTERS[cls](dataset, indices, take)
    for base in cls.__mro__:
        # One that overrides how examples are found may mean something else by its
        # indices.
        if base in _INHERITABLE and all(
            getattr(cls, name, None) is getattr(base, name, None)
            for name in _FINDS_EXAMPLES
        ):
            return _SPLITTERS[base](dataset, indices, take)
    return IndexedView(dataset, indices)


def _split_array(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    array = np.asarray(dataset)
    return array[indices] if array.dtype.hasobject else take(array, indices)


def _split_sequence(dataset: Any, indices: np.ndarray, _take: TakeRows) -> Any:
    return type(dataset)(dataset[i] for i in indices.tolist())


# Chainer's data sets have no public names for what they are made of; 7.8.1 is its last
# release but for repairs, so these stay.


def _split_columns(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    if isinstance(dataset, DictDataset):
        columns = dataset._datasets.items()
        return DictDataset(**{key: subset(d, indices, take) for key, d in columns})
    return TupleDataset(*(subset(d, indices, take) for d in dataset._datasets))


def _split_subset(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    indices = indices + dataset._start
    if dataset._order is not None:
        indices = np.asarray(dataset._order, dtype=np.int64)[indices]
    indices = indices % max(1, len(dataset._dataset))  # an order may say -1
    return subset(dataset._dataset, indices, take)


def _split_concatenated(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    ends = np.cumsum([len(d) for d in dataset._datasets])
    source = np.searchsorted(ends, indices, side="right")
    parts = [
        subset(d, indices[source == i] - (ends[i] - len(d)), take)
        for i, d in enumerate(dataset._datasets)
    ]
    position = np.empty(len(indices), dtype=np.int64)
    position[np.argsort(source, kind="stable")] = np.arange(len(indices))
    return IndexedView(ConcatenatedDataset(*parts), position)


def _replacing(attribute: str) -> _Splitter:
    """Return a splitter of the data set in ``attribute``; all other attributes stay."""

    def split(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
        part = copy.copy(dataset)
        setattr(part, attribute, subset(getattr(dataset, attribute), indices, take))
        return part

    return split


_SPLITTERS: dict[type, _Splitter] = {
    np.ndarray: _split_array,
    np.memmap: _split_array,
    SharedArray: _split_array,
    list: _split_sequence,
    tuple: _split_sequence,
    TupleDataset: _split_columns,
    DictDataset: _split_columns,
    SubDataset: _split_subset,
    ConcatenatedDataset: _split_concatenated,
    TransformDataset: _replacing("_dataset"),
    ImageDataset: _replacing("_paths"),
    LabeledImageDataset: _replacing("_pairs"),
}
# Built-in sequences and arrays are subclassed to mean something else: masked arrays,
# say.
_INHERITABLE = _SPLITTERS.keys() - {np.ndarray, np.memmap, SharedArray, list, tuple}
_FINDS_EXAMPLES = ("__getitem__", "get_example", "__len__")
