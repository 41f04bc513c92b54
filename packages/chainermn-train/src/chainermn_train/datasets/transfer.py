"""The transfer of each rank's part of one rank's data set.

The rows of NumPy arrays go in messages into files that each rank makes
(shared_arrays.py). All other data are pickled.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import bcast_checked, raise_on_all_ranks
from .shared_arrays import SharedArray
from .subset import subset

_OPERATION = "scatter_dataset"
# Longer messages are no faster, and the memory that they are received in would stay
# with the process.
_MESSAGE_BYTES = 1 << 20


def scatter_parts(
    comm: CommunicatorBase,
    root: int,
    dataset: Any,
    indices: Sequence[np.ndarray] | None,
    max_buf_len: int = _MESSAGE_BYTES,
) -> Any:
    """Return this rank's part of the root's data set (collective).

    ``indices``, which only the root has, are the int64 indices of each rank's examples.
    """
    limit = bcast_checked(
        comm, _OPERATION, lambda: min(max_buf_len, _MESSAGE_BYTES), root
    )
    # A communicator of its own: messages of the user may be under way, with any tag.
    with comm.split(0, comm.rank) as messages, raise_on_all_ranks(comm, _OPERATION):
        if indices is None:
            return _receive(messages, root, limit)
        return _send_all(messages, dataset, indices, limit)


def _send_all(
    comm: CommunicatorBase, dataset: Any, indices: Sequence[np.ndarray], limit: int
) -> Any:
    """Send the others their parts, one after the other; return the own one."""
    errors: list[BaseException] = []

    def send_part(rank: int) -> None:  # after which its memory is free
        pickled, arrays = _pickle_of(None), list[np.ndarray]()
        try:
            if not errors:
                part, found = _part(dataset, indices[rank])
                pickled, arrays = (
                    _pickle_of(part, found),
                    [each.array for each in found],
                )
        except BaseException as error:
            errors.append(error)
        comm.send_obj(
            (pickled, [(array.shape, array.dtype) for array in arrays]), rank, 0
        )
        try:
            for array in arrays:
                rows = array.reshape(-1).view(np.uint8)
                for begin in range(0, len(rows), limit):
                    comm.send(rows[begin : begin + limit], rank, 0)
        except BaseException as error:
            errors.append(error)
            comm.send(np.empty(0, np.uint8), rank, 0)  # nothing follows

    for rank in range(comm.size):
        if rank != comm.rank:
            send_part(rank)
    if errors:
        raise errors.pop(0)  # no frame in its traceback may refer to it
    return _part(dataset, indices[comm.rank])[0]


def _receive(comm: CommunicatorBase, root: int, limit: int) -> Any:
    """Return this rank's part; None if the root failed."""
    pickled, forms = comm.recv_obj(root, 0)
    counts = [-(-math.prod(shape) * dtype.itemsize // limit) for shape, dtype in forms]
    blocks, arrays = _blocks(comm, root, sum(counts)), list[SharedArray]()
    try:
        for (shape, dtype), count in zip(forms, counts, strict=True):
            arrays.append(SharedArray.filled(shape, dtype, islice(blocks, count)))
    finally:
        for _ in blocks:  # what is left is received, even if it can't be written
            pass
    unpickler = _Unpickler(io.BytesIO(pickled))
    unpickler.arrays = arrays
    return unpickler.load()


def _blocks(comm: CommunicatorBase, root: int, count: int) -> Iterator[np.ndarray]:
    """Yield ``count`` uint8 arrays, 1-D; an empty one is the last, as the root failed."""
    for _ in range(count):
        block = comm.recv(root, 0)
        yield block
        if not len(block):
            return


def _part(dataset: Any, indices: np.ndarray) -> tuple[Any, list[SharedArray]]:
    """Return a part of a data set, and the copies of arrays' rows in it."""
    taken: list[tuple[np.ndarray, np.ndarray, SharedArray]] = []

    def take(source: np.ndarray, chosen: np.ndarray) -> SharedArray:
        for *key, rows in taken:  # as input and target, say
            if key[0] is source and key[1] is chosen:
                return rows
        taken.append(
            (source, chosen, SharedArray(np.ascontiguousarray(source[chosen])))
        )
        return taken[-1][-1]

    return subset(dataset, indices, take), [rows for _, _, rows in taken]


def _pickle_of(part: Any, arrays: Sequence[SharedArray] = ()) -> bytes:
    """Return a pickle that refers to arrays by their numbers."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    pickler.numbers = {id(array): number for number, array in enumerate(arrays)}
    pickler.dump(part)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    numbers: dict[int, int]

    def persistent_id(self, obj: Any) -> int | None:
        return self.numbers.get(id(obj))


class _Unpickler(pickle.Unpickler):
    arrays: list[SharedArray]

    def persistent_load(self, pid: int) -> SharedArray:
        return self.arrays[pid]
