"""The transfer of each rank's part of one rank's data set.

The rows of NumPy arrays go in messages into a file that each rank makes (shared_arrays.py). All
other data are pickled, and sent in messages, too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import bcast_checked, raise_on_all_ranks
from .shared_arrays import ALIGNMENT, SharedArray, SharedFile, write_blocks
from .subset import subset

_OPERATION = "scatter_dataset"
# Longer messages are no faster, and the memory that they are received in would stay with the
# process.
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
    limit = bcast_checked(comm, _OPERATION, lambda: min(max_buf_len, _MESSAGE_BYTES), root)
    # A communicator of its own: messages of the user may be under way, with any tag.
    with comm.split(0, comm.rank) as messages, raise_on_all_ranks(comm, _OPERATION):
        if indices is None:
            return _receive(messages, root)
        return _send_all(messages, dataset, indices, limit)


def _send_all(
    comm: CommunicatorBase, dataset: Any, indices: Sequence[np.ndarray], limit: int
) -> Any:
    """Send the others their parts, one after the other; return the own one."""
    errors: list[BaseException] = []

    def send(rank: int, blocks: Callable[[], Iterable[np.ndarray]]) -> None:
        """Send blocks of bytes, and whether these are all; an error ends all that follow, too."""
        try:
            for block in () if errors else blocks():
                for begin in range(0, len(block), limit):
                    comm.send(block[begin : begin + limit], rank, 0)
        except BaseException as error:
            errors.append(error)
        comm.send(np.array([not errors]), rank, 0)

    def send_part(rank: int) -> None:  # after which its memory is free
        packed = _Packed()
        send(rank, lambda: [packed.pack(_part(dataset, indices[rank]))])
        send(rank, packed.blocks)

    for rank in range(comm.size):
        if rank != comm.rank:
            send_part(rank)
    if errors:
        raise errors.pop(0)  # no frame in its traceback may refer to it
    return _part(dataset, indices[comm.rank])


def _receive(comm: CommunicatorBase, root: int) -> Any:
    """Return this rank's part; None if the root failed."""
    complete: list[bool] = []
    payload = b"".join(block.data for block in _blocks(comm, root, complete))
    rows = _blocks(comm, root, complete)
    try:
        nbytes = int.from_bytes(payload[:8], "little") if all(complete) else 0
        file = SharedFile.reserve(nbytes) if nbytes else None
        if file is not None:
            write_blocks(file.descriptor, rows)
    finally:
        for _ in rows:  # what is left is received, even if it can't be written
            pass
    if not all(complete):
        return None
    unpickler = _Unpickler(io.BytesIO(payload[8:]))
    unpickler.file = file
    return unpickler.load()


def _blocks(comm: CommunicatorBase, root: int, complete: list[bool]) -> Iterator[np.ndarray]:
    """Yield uint8 arrays, 1-D; append to ``complete`` whether the root could send them all."""
    while (block := comm.recv(root, 0)).dtype == np.uint8:
        yield block
    complete.append(bool(block[0]))


def _part(dataset: Any, indices: np.ndarray) -> Any:
    """Return a part of a data set, with copies of its arrays' rows."""
    taken: list[tuple[np.ndarray, np.ndarray, SharedArray]] = []

    def take(source: np.ndarray, chosen: np.ndarray) -> SharedArray:
        for *key, rows in taken:  # as input and target, say
            if key[0] is source and key[1] is chosen:
                return rows
        taken.append((source, chosen, SharedArray(np.ascontiguousarray(source[chosen]))))
        return taken[-1][-1]

    return subset(dataset, indices, take)


class _Packed:
    """A part for another process: a pickle, and the arrays that it refers to."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def pack(self, part: Any) -> np.ndarray:
        """Return the bytes of the file that the arrays need, in 8 bytes, and the pickle (uint8)."""
        buffer, places = io.BytesIO(), dict[int, tuple[Any, ...]]()
        nbytes = ALIGNMENT

        def place_of(obj: Any) -> tuple[Any, ...] | None:
            nonlocal nbytes
            if type(obj) is not SharedArray:
                return None
            if id(obj) not in places:
                array = obj.array
                places[id(obj)] = nbytes, array.shape, array.dtype
                nbytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
                self._arrays.append(array)
            return places[id(obj)]

        pickler = _Pickler(buffer, protocol=5)
        pickler.place_of = place_of
        pickler.dump(part)
        head = (nbytes if nbytes > ALIGNMENT else 0).to_bytes(8, "little")
        return np.frombuffer(head + buffer.getvalue(), np.uint8)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the contents of the file after its first `ALIGNMENT` bytes (uint8, 1-D)."""
        for array in self._arrays:
            if array.nbytes:
                yield array.reshape(-1).view(np.uint8)
            yield np.zeros(-array.nbytes % ALIGNMENT, np.uint8)


class _Pickler(pickle.Pickler):
    place_of: Callable[[Any], tuple[Any, ...] | None]

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        return self.place_of(obj)


class _Unpickler(pickle.Unpickler):
    file: SharedFile | None

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        return SharedArray.load(self.file, *pid)
