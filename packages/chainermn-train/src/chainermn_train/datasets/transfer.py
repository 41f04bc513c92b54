"""The transfer of each rank's part of one rank's data set.

The rows of NumPy arrays go into a file that each rank makes (shared_arrays.py). The root writes
straight from the user's array into the files that it can open, those on its machine; ranks
elsewhere get their rows in messages. All other data are pickled, and sent in messages.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import SharedFailure, allgather_checked, bcast_checked, raise_on_all_ranks
from .scatter_plan import BLOCK_BYTES, ScatterPlan, unpickle_part
from .shared_arrays import SharedFile, write_blocks

_OPERATION = "scatter_dataset"


def scatter_parts(
    comm: CommunicatorBase, root: int, plan: ScatterPlan | None, max_buf_len: int
) -> Any:
    """Return this rank's part of the plan, which only the root has (collective)."""
    rank = comm.rank
    unsplittable = np.empty(0, np.uint8)  # a pickle of the data sets, if there are any
    # Longer messages are no faster, and the memory that they are received in would stay with the
    # process.
    limit = min(max_buf_len, BLOCK_BYTES)
    with SharedFailure(comm.handshake, _OPERATION):
        if plan is not None and plan.unsplittable and comm.size > 1:
            unsplittable = np.frombuffer(pickle.dumps(plan.unsplittable, protocol=5), np.uint8)
    own = (plan.nbytes if plan else []), len(unsplittable), limit
    sizes, length, limit = bcast_checked(comm, _OPERATION, lambda: own, root)
    with SharedFailure(comm.handshake, _OPERATION):
        file = SharedFile.reserve(sizes[rank]) if sizes[rank] else None
    handles = allgather_checked(comm, _OPERATION, lambda: file and file.handle)
    if rank != root:
        unsplittable = np.empty(length, np.uint8)
    for begin in range(0, length, limit):
        piece = unsplittable[begin : begin + limit]
        received = comm.bcast(piece, root=root)
        if rank != root:
            piece[...] = received
    # A communicator of its own: messages of the user may be under way, with any tag.
    with comm.split(0, rank) as messages, ExitStack() as files:
        local: dict[int, int] = {}  # descriptors of the files that the root fills, by rank
        with SharedFailure(comm.handshake, _OPERATION):
            for other, each in enumerate(handles if plan else []):
                if each is not None:
                    with suppress(OSError):  # it is on another machine
                        local[other] = each.open(os.O_RDWR)
                        files.callback(os.close, local[other])
        is_local = rank in bcast_checked(comm, _OPERATION, lambda: list(local), root)
        with raise_on_all_ranks(comm, _OPERATION):
            if plan is None:
                return _receive(messages, root, file, unsplittable, is_local)
            _send_all(messages, plan, local, limit)
            return plan.parts[root]


def _send_all(comm: CommunicatorBase, plan: ScatterPlan, local: dict[int, int], limit: int) -> None:
    """Fill the root's own part and the local files, and send what ranks lack."""
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

    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            own = pool.submit(plan.fill_own)
            list(pool.map(lambda rank: write_blocks(local[rank], plan.iter_file(rank)), local))
            own.result()
    except BaseException as error:
        errors.append(error)
    for rank in range(comm.size):
        if rank != comm.rank:
            send(rank, lambda: [plan.pickle_part(rank)])  # noqa: B023  (called at once)
            if plan.nbytes[rank] and rank not in local:
                send(rank, lambda: plan.iter_file(rank))  # noqa: B023
    if errors:
        raise errors.pop(0)  # no frame in its traceback may refer to it


def _receive(
    comm: CommunicatorBase,
    root: int,
    file: SharedFile | None,
    unsplittable: np.ndarray,
    is_local: bool,
) -> Any:
    """Return this rank's part; None if the root failed, which fills the file if ``is_local``."""
    complete: list[bool] = []
    payload = b"".join(block.data for block in _blocks(comm, root, complete))
    if file is not None and not is_local:
        rows = _blocks(comm, root, complete)
        try:
            write_blocks(file.descriptor, rows)
        finally:
            for _ in rows:  # what is left is received, even if it can't be written
                pass
    return unpickle_part(payload, file, unsplittable) if all(complete) else None


def _blocks(comm: CommunicatorBase, root: int, complete: list[bool]) -> Iterator[np.ndarray]:
    """Yield uint8 arrays, 1-D; append to ``complete`` whether the root could send them all."""
    while (block := comm.recv(root, 0)).dtype == np.uint8:
        yield block
    complete.append(bool(block[0]))
