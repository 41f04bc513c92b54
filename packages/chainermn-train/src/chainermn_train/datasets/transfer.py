"""The transfer of each rank's part of one rank's data set.

The rows of NumPy arrays go in messages into a file that each rank makes
(shared_arrays.py). All other data are pickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from chainer.datasets import SubDataset

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_together
from .shared_arrays import SharedArray, make_shared_file
from .subset import subset

_OPERATION = "scatter_dataset"
# Longer messages are no faster, and the memory that they are received in would stay
# with the process.
_MESSAGE_BYTES = 1 << 20
# Every MPI has this tag, and few programs use it.
_TAG = 32_001


def scatter_parts(
    comm: CommunicatorBase,
    root: int,
    dataset: Any,
    shares: Sequence[tuple[int, int]] | None,
    order: np.ndarray | None = None,
    max_buf_len: int = _MESSAGE_BYTES,
) -> SubDataset:
    """Return this rank's part of the root's data set (collective).

    Only the root has ``shares``: where each rank's examples begin and end, in an
    ``order`` of indices (int64) if there is one.
    """
    with _apart(comm) as messages, raise_together(comm.handshake, _OPERATION):
        if shares is None:
            return _receive(messages, root)
        _send_all(messages, dataset, shares, order, min(max_buf_len, _MESSAGE_BYTES))
        part, arrays, content = _divide(dataset, shares[root], order)
        _place(arrays, content.size, [content])
        return part


def _apart(comm: CommunicatorBase) -> Any:
    """Return a new communicator, since the user's messages may be under way, with any tag.

    A user's communicator that can't be split is used as it is.
    """
    try:
        return comm.split(0, comm.rank)
    except NotImplementedError:
        return nullcontext(comm)


def _send_all(
    comm: CommunicatorBase,
    dataset: Any,
    shares: Sequence[tuple[int, int]],
    order: np.ndarray | None,
    limit: int,
) -> None:
    """Send the other ranks their parts, one after the other."""
    waiting = [rank for rank in range(comm.size) if rank != comm.rank]
    try:
        while waiting:
            part, arrays, content = _divide(dataset, shares[waiting[0]], order)
            pickled = pickle.dumps((part, arrays), protocol=5)
            rank = waiting.pop(0)
            comm.send_obj((pickled, content.size), rank, _TAG)
            for begin in range(0, content.size, limit):
                comm.send(content[begin : begin + limit], rank, _TAG)
            del part, arrays, content  # before the next ones take memory
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
    blocks = _received_blocks(comm, root, nbytes)
    try:
        part, arrays = pickle.loads(pickled)
        _place(arrays, nbytes, blocks)
    finally:
        for _ in blocks:  # what is left is received, even if it can't be written
            pass
    return part


def _received_blocks(
    comm: CommunicatorBase, root: int, nbytes: int
) -> Iterator[np.ndarray]:
    while nbytes:
        block = comm.recv(root, _TAG)
        nbytes -= len(block)
        yield block


def _place(arrays: list[SharedArray], nbytes: int, blocks: Any) -> None:
    """Let the arrays of a part lie in a new file, whose bytes are in ``blocks``."""
    if nbytes:
        file = make_shared_file(nbytes, blocks)
        for array in arrays:
            array.file = file


def _divide(
    dataset: Any, share: tuple[int, int], order: np.ndarray | None
) -> tuple[SubDataset, list[SharedArray], np.ndarray]:
    """Return a part of a data set, the arrays in it, and the bytes of the file that they need."""
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    arrays: list[SharedArray] = []
    nbytes = 0

    def take(source: np.ndarray, indices: np.ndarray) -> SharedArray:
        nonlocal nbytes
        for array, (known, chosen) in zip(arrays, rows, strict=True):
            if known is source and chosen is indices:  # input and target, say
                return array
        array = SharedArray(nbytes, (len(indices), *source.shape[1:]), source.dtype)
        nbytes = array.end
        rows.append((source, indices))
        arrays.append(array)
        return array

    part = subset(dataset, *share, order, take)
    content = np.empty(nbytes, np.uint8)
    for array, (source, indices) in zip(arrays, rows, strict=True):
        # In the mode "raise", the rows would go through a buffer.
        np.take(source, indices, 0, array.within(content), "clip")
    return part, arrays, content
