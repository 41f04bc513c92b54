"""Subsets of data sets: the chosen examples, if possible without all other examples."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Sequence
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

# Returns what stands for the rows at int64 indices of an array, whose dtype has no objects.
TakeRows = Callable[[np.ndarray, np.ndarray], Any]


def subset(
    dataset: Any, begin: int, end: int, order: Any, take: TakeRows
) -> SubDataset:
    """Return ``SubDataset(dataset, begin, end, order)``, or a subset of a part with these examples.

    The whole data set is behind the result only if :func:`divide` can't divide it.
    """
    indices = np.arange(begin, end)
    if order is not None:
        indices = order[begin:end]
    part = divide(dataset, indices, take)
    if part is None:
        if order is not None:
            order = _numbers(order)
        return SubDataset(dataset, begin, end, order)
    if isinstance(dataset, ConcatenatedDataset):
        return part  # a SubDataset already
    return SubDataset(part, 0, len(part))


def divide(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    """Return a data set of the examples at ``indices`` (int64, shape (n,)), in that order.

    The function divides arrays, lists and tuples, and data sets of the classes in _DATASETS
    and of subclasses that find examples as their base class does. Arrays stay arrays, and
    paths stay paths; no example is computed or read. Other data sets, and data sets that
    consist of these alone, can't be divided: the function returns None.
    """
    cls = type(dataset)
    if cls in _SEQUENCES:
        return _SEQUENCES[cls](dataset, indices, take)
    for base in cls.__mro__:
        # A subclass that overrides how examples are found may mean something else by
        # its indices.
        if base in _DATASETS and all(
            getattr(cls, name, None) is getattr(base, name, None)
            for name in ("__getitem__", "get_example", "__len__")
        ):
            return _DATASETS[base](dataset, indices, take)
    return None


def _divide_all(
    datasets: Sequence[Any], chosen: Sequence[np.ndarray], take: TakeRows
) -> list[Any] | None:
    """Return data sets of the chosen examples of each; None if none can be divided."""
    parts = []
    is_divided = False
    for dataset, indices in zip(datasets, chosen, strict=True):
        part = divide(dataset, indices, take)
        if part is None:
            part = view(dataset, indices)
        else:
            is_divided = True
        parts.append(part)
    return parts if is_divided else None


def view(dataset: Any, indices: np.ndarray) -> SubDataset:
    """Return the examples at ``indices`` of a whole data set."""
    # An order is as long as the data set. The numbers after these indices are not used.
    order = np.resize(indices, len(dataset))
    return SubDataset(dataset, 0, len(indices), _numbers(order))


def _numbers(order: np.ndarray) -> array[int]:
    """Return an order of Python's integers, which some classes insist on."""
    return array("q", order.tobytes())


def _with(dataset: Any, **attributes: Any) -> Any:
    """Return a copy of a data set, of the same class, with new values of these attributes."""
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


# Chainer's data sets have no public names for their parts. Its last release is 7.8.1, so
# these private names stay.


def _split_columns(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    columns = dataset._datasets
    if isinstance(dataset, DictDataset):
        columns = list(columns.values())
    parts: Any = _divide_all(columns, [indices] * len(columns), take)
    if parts is None:
        return None
    if isinstance(dataset, DictDataset):
        parts = dict(zip(dataset._datasets, parts, strict=True))
    return _with(dataset, _datasets=parts, _length=len(indices))


def _split_subset(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    indices = indices + dataset._start
    if dataset._order is not None:
        indices = np.asarray(dataset._order, dtype=np.int64)[indices]
    indices = indices % max(1, len(dataset._dataset))  # an order may contain -1
    part = divide(dataset._dataset, indices, take)
    if part is None:
        return None
    size = len(part)
    return _with(
        dataset, _dataset=part, _start=0, _finish=size, _size=size, _order=None
    )


def _split_concatenated(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
    bases = dataset._datasets
    begins = np.cumsum([0, *map(len, bases)])
    owners = np.searchsorted(begins, indices, "right") - 1
    chosen = [indices[owners == i] - begins[i] for i in range(len(bases))]
    parts = _divide_all(bases, chosen, take)
    if parts is None:
        return None
    # The places of the first data set's examples, then those of the second one's, and
    # so on.
    grouped = np.argsort(owners, kind="stable")
    return view(_with(dataset, _datasets=parts), np.argsort(grouped))


def _replacing(attribute: str) -> Callable[..., Any]:
    """Return a splitter of the data set in ``attribute``; all other attributes stay."""

    def split(dataset: Any, indices: np.ndarray, take: TakeRows) -> Any:
        part = divide(getattr(dataset, attribute), indices, take)
        if part is None:
            return None
        return _with(dataset, **{attribute: part})

    return split


# Subclasses, such as masked arrays, are not divided, since they may mean something
# else.
_SEQUENCES = {
    np.ndarray: _split_array,
    np.memmap: _split_array,
    SharedArray: _split_array,
    list: _split_sequence,
    tuple: _split_sequence,
}
_DATASETS = {
    TupleDataset: _split_columns,
    DictDataset: _split_columns,
    SubDataset: _split_subset,
    ConcatenatedDataset: _split_concatenated,
    TransformDataset: _replacing("_dataset"),
    ImageDataset: _replacing("_paths"),
    LabeledImageDataset: _replacing("_pairs"),
}
