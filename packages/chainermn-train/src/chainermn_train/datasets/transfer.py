"""The transfer of each rank's part of one rank's data set.

The rows of NumPy arrays go in messages into a file that each rank makes
(shared_arrays.py). All other data are pickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from chainer.datasets import SubDataset

from chainermn_comm import CommunicatorBase

from ..collective_errors import bcast_checked, raise_together
from .shared_arrays import SharedArray, SharedBytes
from .subset import subset

_OPERATION = "scatter_dataset"
# Longer messages are no faster, and the memory that they are received in would stay
# with the process.
_MESSAGE_BYTES = 1 << 20
# Every MPI has it, and few programs use it.
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
    limit = bcast_checked(
        comm, _OPERATION, lambda: min(max_buf_len, _MESSAGE_BYTES), root
    )
    with _apart(comm) as messages, raise_together(comm.handshake, _OPERATION):
        if shares is None:
            return _receive(messages, root, limit)
        return _send_all(messages, dataset, shares, order, limit)


def _apart(comm: CommunicatorBase) -> Any:
    """Return a communicator of its own: messages of the user may be under way, with any tag.

    If a user's communicator can't be split, it is that itself.
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
) -> SubDataset:
    """Send the others their parts, one after the other; return the own one."""
    errors: list[BaseException] = []

    def send_part(rank: int) -> None:  # after which its memory is free
        pickled = pickle.dumps(None)
        rows = np.empty(0, np.uint8)
        try:
            if not errors:
                part, place = _part(dataset, shares[rank], order)
                pickled = _pickle_of(part, place)
                rows = place.array
        except BaseException as error:
            errors.append(error)
        comm.send_obj((pickled, rows.size), rank, _TAG)
        try:
            for begin in range(0, rows.size, limit):
                comm.send(rows[begin : begin + limit], rank, _TAG)
        except BaseException as error:
            errors.append(error)
            comm.send(np.empty(0, np.uint8), rank, _TAG)  # nothing follows

    for rank in range(comm.size):
        if rank != comm.rank:
            send_part(rank)
    if errors:
        raise errors.pop(0)  # no frame in its traceback may refer to it
    return _part(dataset, shares[comm.rank], order)[0]


def _receive(comm: CommunicatorBase, root: int, limit: int) -> SubDataset:
    """Return this rank's part; None if the root failed."""
    pickled, nbytes = comm.recv_obj(root, _TAG)
    blocks = _blocks(comm, root, -(-nbytes // limit))
    try:
        received = SharedBytes.filled(nbytes, blocks)
    finally:
        for _ in blocks:  # what is left is received, even if it can't be written
            pass
    unpickler = _Unpickler(io.BytesIO(pickled))
    unpickler.place = received
    return unpickler.load()


def _blocks(comm: CommunicatorBase, root: int, count: int) -> Iterator[np.ndarray]:
    """Yield ``count`` uint8 arrays, 1-D; an empty one is the last, as the root failed."""
    for _ in range(count):
        block = comm.recv(root, _TAG)
        yield block
        if not len(block):
            return


def _part(
    dataset: Any, share: tuple[int, int], order: np.ndarray | None
) -> tuple[SubDataset, SharedBytes]:
    """Return a part of a data set, and the copies of arrays' rows in it."""
    place = SharedBytes.load(None, 0)
    taken: list[tuple[np.ndarray, np.ndarray, SharedArray]] = []

    def take(source: np.ndarray, chosen: np.ndarray) -> SharedArray:
        begin = 0
        for *key, rows in taken:  # as input and target, say
            if key[0] is source and key[1] is chosen:
                return rows
            begin = rows.end
        shape = (len(chosen), *source.shape[1:])
        taken.append((source, chosen, SharedArray(place, begin, shape, source.dtype)))
        return taken[-1][-1]

    part = subset(dataset, *share, order, take)
    if taken:
        place.array = np.empty(taken[-1][-1].end, np.uint8)
    for source, chosen, rows in taken:
        # With this mode, it writes there at once.
        np.take(source, chosen, 0, rows.array, "clip")
    return part, place


def _pickle_of(part: Any, place: SharedBytes) -> bytes:
    """Return a pickle that doesn't hold the arrays' bytes."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    pickler.place = place
    pickler.dump(part)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    place: SharedBytes

    def persistent_id(self, obj: Any) -> int | None:
        return 0 if obj is self.place else None


class _Unpickler(pickle.Unpickler):
    place: SharedBytes

    def persistent_load(self, pid: int) -> SharedBytes:
        return self.place
