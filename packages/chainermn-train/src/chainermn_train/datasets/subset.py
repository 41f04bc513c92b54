"""Subsets of data sets that hold the chosen examples, and nothing of the others if they can."""

from __future__ import annotations

import copy
import operator
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
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

# Returns what stands for an array's rows at int64 indices; of any dtype but object.
TakeRows = Callable[[np.ndarray, np.ndarray], Any]
_Splitter = Callable[[Any, np.ndarray, TakeRows], Any]


def subset(
    dataset: Any, begin: int, end: int, order: np.ndarray | None, take: TakeRows
) -> SubDataset:
    """Return ``SubDataset(dataset, begin, end, order)``, or one over a part with the same examples.

    The data set itself is behind the result only where :func:`divide` can't divide it.
    """
    indices = np.arange(begin, end)
    if order is not None:
        indices = order[begin:end]
    part = divide(dataset, indices, take)
    if part is None:
        numbers = None
        if order is not None:
            numbers = _numbers(order)
        return SubDataset(dataset, begin, end, numbers)
    if isinstance(dataset, ConcatenatedDataset):
        return part  # a SubDataset of a concatenation already
    return SubDataset(part, 0, len(part))


def divide(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    """Return a data set of the examples at ``indices`` (int64, shape (n,)), in that order.

    Data sets of the classes in _SPLITTERS are divided, and of subclasses of Chainer's
    that find examples as their base does: arrays as arrays, paths as paths. No example
    is computed or read. The function returns None for any other data set, and for one
    that is made of such ones alone: they can't be divided.
    """
    cls = type(dataset)
    if cls in _SPLITTERS:
        return _SPLITTERS[cls](dataset, indices, take)
    for base in cls.__mro__:
        # A subclass that overrides how examples are found may mean something else by
        # its indices.
        if base in _INHERITABLE and all(
            getattr(cls, name, None) is getattr(base, name, None)
            for name in _FINDS_EXAMPLES
        ):
            return _SPLITTERS[base](dataset, indices, take)
    return None


def view(dataset: Any, indices: np.ndarray) -> SubDataset:
    """Return the examples at ``indices`` of a whole data set."""
    # An order is as long as the data set; what comes after these indices is not used.
    order = np.resize(indices, len(dataset))
    return SubDataset(dataset, 0, len(indices), _numbers(order))


def _numbers(order: np.ndarray) -> array[int]:
    """Return an order of Python's integers, which some classes insist on."""
    return array("q", order.tobytes())


def _with(dataset: Any, **attributes: Any) -> Any:
    """Return a copy of a data set, of its own class, with other values of these attributes."""
    part = copy.copy(dataset)
    vars(part).update(attributes)
    return part


def _split_array(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    rows = np.asarray(dataset)
    if rows.dtype.hasobject:
        return rows[indices]
    return take(rows, indices)


def _split_sequence(dataset: Any, indices: np.ndarray, _take: TakeRows) -> Any:
    return type(dataset)(dataset[i] for i in indices.tolist())


# Chainer's data sets have no public names for what they are made of; 7.8.1 is its last
# release but for repairs, so these stay.


def _split_columns(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    columns = dataset._datasets
    if isinstance(dataset, DictDataset):
        columns = columns.values()
    found = [divide(column, indices, take) for column in columns]
    if all(part is None for part in found):
        return None
    parts: Any = tuple(
        [
            view(column, indices) if part is None else part
            for column, part in zip(columns, found, strict=True)
        ]
    )
    if isinstance(dataset, DictDataset):
        parts = dict(zip(dataset._datasets, parts, strict=True))
    return _with(dataset, _datasets=parts, _length=len(indices))


def _split_subset(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    indices = indices + dataset._start
    if dataset._order is not None:
        indices = np.asarray(dataset._order, dtype=np.int64)[indices]
    indices = indices % max(1, len(dataset._dataset))  # an order may say -1
    part = divide(dataset._dataset, indices, take)
    if part is None:
        return None
    size = len(part)
    return _with(
        dataset, _dataset=part, _start=0, _finish=size, _size=size, _order=None
    )


def _split_concatenated(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    parts = []
    position = np.empty_like(indices)
    first = 0
    begin = 0
    for base in dataset._datasets:
        own = (first <= indices) & (indices < first + len(base))
        inner = indices[own] - first
        first += len(base)
        part = divide(base, inner, take)
        if part is None:
            part = base
        else:
            inner = np.arange(len(part))
        position[own] = begin + inner
        begin += len(part)
        parts.append(part)
    if all(map(operator.is_, parts, dataset._datasets)):
        return None
    return view(_with(dataset, _datasets=tuple(parts)), position)


def _replacing(attribute: str) -> _Splitter:
    """Return a splitter of the data set in ``attribute``; all other attributes stay."""

    def split(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
        part = divide(getattr(dataset, attribute), indices, take)
        if part is None:
            return None
        return _with(dataset, **{attribute: part})

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
