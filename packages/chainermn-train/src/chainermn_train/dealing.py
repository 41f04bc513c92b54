"""Brings each rank the part of one rank's data set that is meant for it.

Rows of NumPy arrays go into a file for each rank (shared_arrays.py). For ranks on its machine
the root makes it, and writes it straight from the user's array; the others make it themselves,
and get the rows in messages. All other data are pickled, and sent in messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase
from chainermn_comm.watchdog import watch_call

from .agreement import call_or_raise
from .parcels import Parcels, dumps, loads
from .rows import BLOCK_BYTES
from .shared_arrays import ALIGNMENT, SharedFile

# A tag that a user's own messages are unlikely to carry.
_TAG = 23719
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
        BaseException: what failed on this rank, or PeerError that names the rank where it did.
    """
    parcels: Parcels | None = None
    opaque: list[np.ndarray] = []
    gate: SharedFile | None = None

    def outline() -> tuple[Any, ...] | None:
        nonlocal parcels, opaque, gate
        if communicator.rank != root:
            return None
        parcels = make_parcels()
        if communicator.size > 1:
            opaque = [dumps(dataset) for dataset in parcels.opaque]
            if any(parcels.nbytes):
                gate = SharedFile.reserve(ALIGNMENT)
                gate.shut()
        # Longer messages are no faster, and the memory that they are received in would stay with
        # the process.
        limit = min(max_buf_len, BLOCK_BYTES)
        address = None if gate is None else gate.address
        return parcels.nbytes, [len(each) for each in opaque], limit, address

    sizes, lengths, limit, address = call_or_raise(communicator, outline)[root]
    file: SharedFile | None = None

    def come_near() -> bool:
        """Whether the root's files can be opened here; else make one."""
        nonlocal file, gate
        if communicator.rank == root or not sizes[communicator.rank]:
            return True
        try:
            gate = SharedFile.at(address)
        except OSError:
            file = SharedFile.reserve(sizes[communicator.rank])
        return gate is not None

    near = call_or_raise(communicator, come_near)
    if communicator.rank != root:
        opaque = [np.empty(length, np.uint8) for length in lengths]
    for each in opaque:
        _bcast(communicator, each, limit, root)

    files: dict[int, SharedFile] = {}
    part = None

    def receive() -> None:
        nonlocal part
        if parcels is None:
            part = _receive(communicator, root, gate, file, opaque, limit)
            return
        _send_all(communicator, parcels, near, gate, files, limit)
        part = parcels.parts[root]

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
    near: list[bool],
    gate: SharedFile | None,
    files: dict[int, SharedFile],
    limit: int,
) -> None:
    """Fill the root's own part and the files of near ranks, and send all others' parcels.

    The files are put in ``files``. If something fails, ranks that still wait are told so, or get
    zeros, before it is raised.
    """
    failures: list[BaseException] = []
    try:
        files.update(_fill(parcels, [rank for rank, is_near in enumerate(near) if is_near]))
    except BaseException as exception:
        failures.append(exception)
    finally:
        if gate is not None:
            gate.open()
    told = [
        rank
        for rank in range(communicator.size)
        if rank != communicator.rank
        and _send_pickled(communicator, parcels, rank, files.get(rank), limit, failures)
    ]
    for rank in told:
        if not near[rank]:
            nbytes = parcels.nbytes[rank] - ALIGNMENT
            contents = _to_the_end(parcels.contents(rank), nbytes, failures)
            _send_pieces(communicator, contents, rank, limit)
    if failures:
        raise failures[0]


def _fill(parcels: Parcels, near: list[int]) -> dict[int, SharedFile]:
    """Fill the root's own part, and files with the arrays of near ranks that have any."""

    def make(rank: int) -> SharedFile:
        file = SharedFile.reserve(parcels.nbytes[rank])
        file.fill(parcels.contents(rank))
        return file

    ranks = [rank for rank in near if parcels.nbytes[rank]]
    # The near ranks sleep before the gate, and leave their cores to the root.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        own = pool.submit(parcels.fill_own)
        files = dict(zip(ranks, pool.map(make, ranks), strict=True))
        own.result()
    return files


def _send_pickled(
    communicator: CommunicatorBase,
    parcels: Parcels,
    rank: int,
    file: SharedFile | None,
    limit: int,
    failures: list[BaseException],
) -> bool:
    """Send a rank's part and where its arrays lie, or that none comes; return whether one does."""
    payload = None
    if not failures:
        try:
            payload = parcels.pickled(rank, file)
        except BaseException as exception:
            failures.append(exception)
    length = _NONE_COMES if payload is None else len(payload)
    communicator.send(np.array([length], dtype=np.int64), rank, _TAG)
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
    data: Iterator[np.ndarray], nbytes: int, failures: list[BaseException]
) -> Iterator[np.ndarray]:
    """So many bytes in any case: zeros once something has failed."""
    left = nbytes
    try:
        for block in data if not failures else ():
            left -= len(block)
            yield block
    except GeneratorExit:  # nobody takes any more
        raise
    except BaseException as exception:
        failures.append(exception)
    while left > 0:
        zeros = np.zeros(min(left, BLOCK_BYTES), np.uint8)
        left -= len(zeros)
        yield zeros


def _receive(
    communicator: CommunicatorBase,
    root: int,
    gate: SharedFile | None,
    file: SharedFile | None,
    opaque: list[np.ndarray],
    limit: int,
) -> Any:
    """This rank's part; None if the root says that none comes, since it has failed.

    Args:
        communicator: with which the root deals.
        root: its rank.
        gate: open once the root has made this rank's file; None if the root doesn't.
        file: which this rank has made; None if it doesn't.
        opaque: the arrays that the part refers to and that come on their own.
        limit: bytes that the root sends at once.
    """
    if gate is not None:
        with watch_call("scatter_dataset"):
            gate.wait_until_open()  # asleep: in a receive it would keep a core busy
    (length,) = (int(n) for n in communicator.recv(root, _TAG))
    if length == _NONE_COMES:
        return None
    payload = np.empty(length, dtype=np.uint8)
    for begin in range(0, length, limit):
        payload[begin : begin + limit] = communicator.recv(root, _TAG)
    if file is not None:
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
