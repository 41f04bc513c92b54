"""Brings each rank the part of one rank's data set that is meant for it.

Rows of NumPy arrays go into a file that the receiving rank reserves (shared_arrays.py): where
the root can open it, on the same machine, it writes them there straight from the user's array,
and else in messages. All other data are pickled, and sent in messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from .agreement import call_or_raise
from .parcels import Parcels, dumps, loads
from .rows import RUN_BYTES
from .shared_arrays import ALIGNMENT, Address, SharedFile, fill, writing

# A tag that a user's own messages are unlikely to carry.
_TAG = 23719
# In a message at most, whatever `max_buf_len` allows: longer ones are no faster, and the memory
# that they are received in would stay with the process.
_MESSAGE_BYTES = 1 << 20
# Instead of a length: the root could not make this part.
_NONE_COMES = -1


def deal(
    communicator: CommunicatorBase, root: int, make_parcels: Callable[[], Parcels], max_buf_len: int
) -> Any:
    """Give every rank its part (collective).

    Args:
        communicator: anybody's.
        root: the rank that deals.
        make_parcels: called by the root only.
        max_buf_len: bytes in a message at most; the root's counts.

    Returns:
        This rank's part.

    Raises:
        Exception: what failed on this rank, or PeerError that names the rank where it did.
    """
    parcels: Parcels | None = None
    opaque: list[np.ndarray] = []

    def outline() -> tuple[list[int], list[int], int] | None:
        nonlocal parcels, opaque
        if communicator.rank != root:
            return None
        parcels = make_parcels()
        if communicator.size > 1:
            opaque = [dumps(dataset) for dataset in parcels.opaque]
        limit = min(max_buf_len, _MESSAGE_BYTES)
        return parcels.nbytes, [len(each) for each in opaque], limit

    sizes, lengths, limit = call_or_raise(communicator, outline)[root]
    nbytes = sizes[communicator.rank]
    file: SharedFile | None = None

    def reserve() -> Address | None:
        nonlocal file
        file = SharedFile.reserve(nbytes) if nbytes else None
        return None if file is None else file.address

    addresses = call_or_raise(communicator, reserve)
    if communicator.rank != root:
        opaque = [np.empty(length, np.uint8) for length in lengths]
    for each in opaque:
        _bcast(communicator, each, limit, root)

    part = None

    def receive() -> None:
        nonlocal part
        if parcels is None:
            part = _receive(communicator, root, file, opaque, limit)
        else:
            _send_all(communicator, parcels, file, addresses, limit)
            part = parcels.attached(root, file)

    call_or_raise(communicator, receive)
    return part


def _bcast(communicator: CommunicatorBase, data: np.ndarray, limit: int, root: int) -> None:
    """Fill everybody's bytes (uint8, 1-D, of one length) with the root's (collective)."""
    for begin in range(0, len(data), limit):
        piece = data[begin : begin + limit]
        if communicator.rank == root:
            communicator.bcast(piece, root=root)
        else:
            piece[...] = communicator.bcast(None, root=root)


def _send_all(
    communicator: CommunicatorBase,
    parcels: Parcels,
    file: SharedFile | None,
    addresses: list[Address | None],
    limit: int,
) -> None:
    """Send the others their parcels, and fill all files, the root's own among them.

    If something fails, ranks that still wait are told so, or get zeros, before it is raised.
    """
    failures: list[Exception] = []
    others = [rank for rank in range(communicator.size) if rank != communicator.rank]
    with contextlib.ExitStack() as stack:
        near = {} if file is None else {communicator.rank: file.descriptor}
        for rank in others:
            address = addresses[rank]
            descriptor = address and stack.enter_context(writing(address))
            if descriptor is not None:
                near[rank] = descriptor
        # Those that are near sleep until the root leaves this `with`: they take no core from it.
        far = []
        for rank in others:
            told = _send_pickled(communicator, parcels, rank, rank in near, limit, failures)
            if told and rank not in near:
                far.append(rank)
        for rank in [*far, *near]:
            data = _to_the_end(parcels.contents(rank), parcels.nbytes[rank] - ALIGNMENT, failures)
            if rank in near:
                fill(near[rank], data)
            else:
                _send_pieces(communicator, data, rank, limit)
    if failures:
        raise failures[0]


def _send_pickled(
    communicator: CommunicatorBase,
    parcels: Parcels,
    rank: int,
    near: bool,
    limit: int,
    failures: list[Exception],
) -> bool:
    """Send a rank's part without its arrays, or that none comes; return whether one does."""
    payload = None
    if not failures:
        try:
            payload = parcels.pickled(rank)
        except Exception as exception:
            failures.append(exception)
    length = _NONE_COMES if payload is None else len(payload)
    communicator.send(np.array([length, near], dtype=np.int64), rank, _TAG)
    if payload is not None:
        _send_pieces(communicator, [payload], rank, limit)
    return payload is not None


def _send_pieces(
    communicator: CommunicatorBase, data: Iterable[np.ndarray], rank: int, limit: int
) -> None:
    for block in data:
        for begin in range(0, len(block), limit):
            communicator.send(block[begin : begin + limit], rank, _TAG)


def _to_the_end(
    data: Iterator[np.ndarray], nbytes: int, failures: list[Exception]
) -> Iterator[np.ndarray]:
    """So many bytes in any case: zeros once something has failed."""
    left = nbytes
    try:
        for block in data if not failures else ():
            left -= len(block)
            yield block
    except Exception as exception:
        failures.append(exception)
    while left > 0:
        zeros = np.zeros(min(left, RUN_BYTES), np.uint8)
        left -= len(zeros)
        yield zeros


def _receive(
    communicator: CommunicatorBase,
    root: int,
    file: SharedFile | None,
    opaque: list[np.ndarray],
    limit: int,
) -> Any:
    """This rank's part; None if the root says that none comes, since it has failed."""
    length, near = (int(n) for n in communicator.recv(root, _TAG))
    if length == _NONE_COMES:
        return None
    payload = np.empty(length, dtype=np.uint8)
    for begin in range(0, length, limit):
        payload[begin : begin + limit] = communicator.recv(root, _TAG)
    if near and file is not None:
        file.wait_until_written()
    elif file is not None:
        _receive_file(communicator, root, file)
    return loads(payload, file, opaque)


def _receive_file(communicator: CommunicatorBase, root: int, file: SharedFile) -> None:
    """Write what the root sends; all of it is received even if it can't be written."""
    error: Exception | None = None
    position = ALIGNMENT
    while position < file.nbytes:
        piece = communicator.recv(root, _TAG)
        try:
            if error is None:
                file.write(piece, position)
        except OSError as exception:
            error = exception
        position += len(piece)
    if error is not None:
        raise error
