"""Takes some examples out of a data set, so that no more than those need be sent or kept.

How a rank's part travels and where it lies is not decided here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Selection(DatasetMixin):
    """The examples of ``dataset`` at ``indices``."""

    def __init__(self, dataset: Any, indices: np.ndarray) -> None:
        self._dataset = dataset
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def get_example(self, i: int) -> Any:
        return self._dataset[int(self._indices[i])]


class Leaves(NamedTuple):
    """What becomes of the data that a data set is made of in the end.

    Both are given what it is and the int64 array of the indices that are wanted.
    """

    rows: Callable[[np.ndarray, np.ndarray], Any]  # of an array of any dtype but object
    opaque: Callable[[Any, np.ndarray], Any]


_Taker = Callable[[Any, np.ndarray, Leaves], Any]


def take(dataset: Any, indices: np.ndarray, leaves: Leaves) -> Any:
    """A data set of the examples at ``indices``, in that order.

    Args:
        dataset: any data set. Of NumPy arrays, lists, tuples and the data sets of
            :mod:`chainer.datasets` that are listed below, only the examples asked for are
            taken: arrays as arrays, paths as paths. Nothing is computed or read: a
            transformation still happens when an example is used. So it is with subclasses
            of the latter that find examples as they do. Any other data set is opaque; the
            result holds the whole of it.
        indices: int64 array of shape (n,); each in ``range(len(dataset))``.
        leaves: how rows are taken of an array, and examples of an opaque data set.

    Returns:
        A data set of length n, of the same kind where only the examples were taken.
    """
    return _taker_for(type(dataset))(dataset, indices, leaves)


def _taker_for(cls: type) -> _Taker:
    """What takes examples of a class.

    A subclass that overrides how examples are found may mean something else by its indices.
    """
    if cls in _TAKERS:
        return _TAKERS[cls]
    for base in cls.__mro__:
        if base in _INHERITABLE and all(
            getattr(cls, name, None) is getattr(base, name, None) for name in _FINDS_EXAMPLES
        ):
            return _TAKERS[base]
    return lambda dataset, indices, leaves: leaves.opaque(dataset, indices)


def _take_array(dataset: np.ndarray, indices: np.ndarray, leaves: Leaves) -> Any:
    array = np.asarray(dataset)
    return array[indices] if array.dtype.hasobject else leaves.rows(array, indices)


def _take_shared(dataset: SharedArray, indices: np.ndarray, leaves: Leaves) -> Any:
    return leaves.rows(dataset.array, indices)


def _take_list(dataset: list[Any], indices: np.ndarray, _leaves: Leaves) -> list[Any]:
    return [dataset[i] for i in indices.tolist()]


def _take_tuple(dataset: tuple[Any, ...], indices: np.ndarray, _leaves: Leaves) -> tuple[Any, ...]:
    return tuple(dataset[i] for i in indices.tolist())


# Chainer's data sets have no public names for what they are made of; 7.8.1 is its last
# release but for repairs, so these stay.


def _take_columns(dataset: Any, indices: np.ndarray, leaves: Leaves) -> Any:
    if isinstance(dataset, DictDataset):
        columns = dataset._datasets.items()
        return DictDataset(**{key: take(d, indices, leaves) for key, d in columns})
    return TupleDataset(*(take(d, indices, leaves) for d in dataset._datasets))


def _take_subset(dataset: Any, indices: np.ndarray, leaves: Leaves) -> Any:
    indices = indices + dataset._start
    if dataset._order is not None:
        indices = np.asarray(dataset._order, dtype=np.int64)[indices]
    indices = indices % max(1, len(dataset._dataset))  # an order may say -1
    return take(dataset._dataset, indices, leaves)


def _take_concatenated(dataset: Any, indices: np.ndarray, leaves: Leaves) -> Any:
    ends = np.cumsum([len(d) for d in dataset._datasets])
    source = np.searchsorted(ends, indices, side="right")
    parts = [
        take(d, indices[source == i] - (ends[i] - len(d)), leaves)
        for i, d in enumerate(dataset._datasets)
    ]
    position = np.empty(len(indices), dtype=np.int64)
    position[np.argsort(source, kind="stable")] = np.arange(len(indices))
    return Selection(ConcatenatedDataset(*parts), position)


def _replacing(attribute: str) -> _Taker:
    """Takes from the data set in ``attribute``, and leaves the others as they are."""

    def taker(dataset: Any, indices: np.ndarray, leaves: Leaves) -> Any:
        part = copy.copy(dataset)
        setattr(part, attribute, take(getattr(dataset, attribute), indices, leaves))
        return part

    return taker


_TAKERS: dict[type, _Taker] = {
    np.ndarray: _take_array,
    np.memmap: _take_array,
    SharedArray: _take_shared,
    list: _take_list,
    tuple: _take_tuple,
    TupleDataset: _take_columns,
    DictDataset: _take_columns,
    SubDataset: _take_subset,
    ConcatenatedDataset: _take_concatenated,
    TransformDataset: _replacing("_dataset"),
    ImageDataset: _replacing("_paths"),
    LabeledImageDataset: _replacing("_pairs"),
}
# Built-in sequences and arrays are subclassed to mean something else: masked arrays, say.
_INHERITABLE = _TAKERS.keys() - {np.ndarray, np.memmap, SharedArray, list, tuple}
_FINDS_EXAMPLES = ("__getitem__", "get_example", "__len__")
