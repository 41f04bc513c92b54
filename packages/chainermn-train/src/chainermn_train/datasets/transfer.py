"""The transfer of each rank's part of one rank's data set.

The rows of NumPy arrays go in messages into a file that each rank makes
(shared_arrays.py). All other data are pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from chainer.datasets import SubDataset

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_together
from .shared_arrays import SharedArray, SharedBytes
from .subset import subset

_OPERATION = "scatter_dataset"
# Longer messages are no faster, and the memory for receiving them would stay with the
# process.
_MESSAGE_BYTES = 1 << 20
# The user's own messages may be under way on the same communicator. Every MPI has this
# tag, and few programs use it.
_TAG = 32_001


def scatter_parts(
    comm: CommunicatorBase,
    root: int,
    dataset: Any,
    shares: Sequence[tuple[int, int]],
    order: np.ndarray | None = None,
) -> SubDataset:
    """Return this rank's part of the root's data set (collective).

    ``shares`` says where each rank's examples begin and end, in an ``order`` of indices
    (int64) if the root has one.
    """
    with raise_together(comm.handshake, _OPERATION):
        if comm.rank != root:
            return _receive(comm, root)
        # Other ranks get their parts one after another, before the root takes its own.
        waiting = [rank for rank in range(comm.size) if rank != root]
        try:
            for rank in (*waiting, root):
                rows = _Rows()
                part = subset(dataset, *shares[rank], order, rows.take)
                if rank == root:
                    rows.copy()
                    return part
                pickled = pickle.dumps((part, rows.shared), protocol=5)
                content = rows.copy()
                waiting.remove(rank)
                comm.send_obj((pickled, len(content)), rank, _TAG)
                for begin in range(0, len(content), _MESSAGE_BYTES):
                    comm.send(content[begin : begin + _MESSAGE_BYTES], rank, _TAG)
                del part, rows, content  # freed before the next parts take memory
        except BaseException:
            for rank in waiting:
                comm.send_obj(None, rank, _TAG)  # instead of a part
            raise


def _receive(comm: CommunicatorBase, root: int) -> Any:
    """Return this rank's part; None if the root failed."""
    message = comm.recv_obj(root, _TAG)
    if message is None:
        return None
    pickled, nbytes = message
    blocks = (comm.recv(root, _TAG) for _ in range(0, nbytes, _MESSAGE_BYTES))
    try:
        part, shared = pickle.loads(pickled)
        if nbytes:
            shared.fill(nbytes, blocks)
    finally:
        for _ in blocks:  # the rest must be received, even if it can't be written
            pass
    return part


class _Rows:
    """The rows of the root's arrays that a part needs, and the shared bytes for them."""

    def __init__(self) -> None:
        self.shared = SharedBytes()
        self._taken: list[tuple[np.ndarray, np.ndarray, SharedArray]] = []
        self._end = 0  # the number of bytes

    def take(self, source: np.ndarray, indices: np.ndarray) -> SharedArray:
        """Return the array that :meth:`copy` copies the rows into."""
        for known, chosen, array in self._taken:
            # One array may be both the inputs and the targets of a data set.
            if known is source and chosen is indices:
                return array
        shape = (len(indices), *source.shape[1:])
        array = SharedArray(self.shared, self._end, shape, source.dtype)
        self._end = array.end
        self._taken.append((source, indices, array))
        return array

    def copy(self) -> Any:
        """Copy the rows into memory of this process, and return all bytes of it."""
        self.shared.content = np.empty(self._end, np.uint8)
        for source, indices, array in self._taken:
            # In the mode "raise", the rows would go through a buffer.
            np.take(source, indices, 0, array.array, "clip")
        return self.shared.content
