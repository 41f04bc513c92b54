"""The transfer of each rank's part of one rank's data set.

The rows of NumPy arrays go into a file that each rank makes (shared_arrays.py). The root writes
straight from the user's array into the files that it can open, those on its machine; ranks
elsewhere get their rows in messages. All other data are pickled, and sent in messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase
from chainermn_comm.watchdog import watch_call

from ..collective_errors import capture_error, run_on_all_ranks
from .scatter_plan import BLOCK_BYTES, ScatterPlan, pickle_dataset, unpickle_part
from .shared_arrays import SharedFile, SharedMemoryHandle, write_blocks

_OPERATION = "scatter_dataset"


def scatter_parts(
    communicator: CommunicatorBase,
    root: int,
    make_plan: Callable[[], ScatterPlan],
    max_buf_len: int,
) -> Any:
    """Give every rank its part (collective).

    Args:
        communicator: the ranks.
        root: the rank that has the data set.
        make_plan: called by the root only.
        max_buf_len: bytes in a message at most; the root's counts.

    Returns:
        This rank's part.

    Raises:
        BaseException: what failed on this rank, or PeerError that names the rank where it did.
    """
    rank = communicator.rank
    plan: ScatterPlan | None = None
    unsplittable: list[np.ndarray] = []

    def prepare() -> tuple[list[int], list[int], int] | None:
        nonlocal plan, unsplittable
        if rank != root:
            return None
        plan = make_plan()
        if communicator.size > 1:
            unsplittable = [pickle_dataset(dataset) for dataset in plan.unsplittable]
        # Longer messages are no faster, and the memory that they are received in would stay with
        # the process.
        limit = min(max_buf_len, BLOCK_BYTES)
        return plan.nbytes, [len(each) for each in unsplittable], limit

    sizes, lengths, limit = run_on_all_ranks(communicator, _OPERATION, prepare)[root]
    file: SharedFile | None = None

    def reserve() -> SharedMemoryHandle | None:
        nonlocal file
        file = SharedFile.reserve(sizes[rank]) if sizes[rank] else None
        return None if file is None else file.handle

    has_arrays = any(sizes)
    handles = run_on_all_ranks(communicator, _OPERATION, reserve) if has_arrays else []
    if rank != root:
        unsplittable = [np.empty(length, np.uint8) for length in lengths]
    for each in unsplittable:
        _bcast(communicator, each, limit, root)
    part = None
    # A communicator of its own: messages of the user may be under way, with any tag.
    with communicator.split(0, rank) as messages, ExitStack() as locks:
        local: dict[int, int] = {}

        def open_local() -> list[int]:
            if rank == root:
                local.update(_open_local(handles, locks))
            return list(local)

        opened = run_on_all_ranks(communicator, _OPERATION, open_local) if has_arrays else None
        is_local = opened is not None and rank in opened[root]

        def transfer() -> None:
            nonlocal part
            if plan is None:
                part = _receive(messages, root, file, unsplittable, is_local)
            else:
                _send_all(messages, plan, local, locks, limit)
                part = plan.parts[root]

        run_on_all_ranks(communicator, _OPERATION, transfer)
    return part


def _open_local(handles: list[SharedMemoryHandle | None], locks: ExitStack) -> dict[int, int]:
    """Return descriptors of those files that can be opened in this process, locked, by rank."""
    descriptors = {}
    for rank, handle in enumerate(handles):
        if handle is not None:
            with suppress(OSError):
                descriptors[rank] = locks.enter_context(handle.open_locked())
    return descriptors


def _bcast(communicator: CommunicatorBase, data: np.ndarray, limit: int, root: int) -> None:
    """Overwrite every rank's bytes (uint8, 1-D, of one length) by the root's (collective)."""
    for begin in range(0, len(data), limit):
        piece = data[begin : begin + limit]
        if communicator.rank == root:
            communicator.bcast(piece, root=root)
        else:
            piece[...] = communicator.bcast(None, root=root)


def _send_all(
    messages: CommunicatorBase,
    plan: ScatterPlan,
    local: dict[int, int],
    locks: ExitStack,
    limit: int,
) -> None:
    """Fill the root's own part and local files, and send to all ranks what they lack.

    Args:
        messages: the communicator that the parts are sent on.
        plan: what each rank gets.
        local: descriptors of the files that the root fills, by rank.
        locks: closes and unlocks them.
        limit: bytes in a message at most.
    """
    errors: list[BaseException] = []

    def fill(rank: int) -> None:
        write_blocks(local[rank], plan.iter_file(rank))

    def send(rank: int, blocks: Callable[[], Iterable[np.ndarray]]) -> None:
        """Send blocks of bytes, and whether these are all; an error ends all that follow, too."""
        try:
            for block in () if errors else blocks():
                for begin in range(0, len(block), limit):
                    messages.send(block[begin : begin + limit], rank, 0)
        except BaseException as error:
            errors.append(error)
        messages.send(np.array([not errors]), rank, 0)

    try:
        # The ranks sleep at the locks, and leave their cores to the root.
        with locks, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            own = pool.submit(plan.fill_own)
            list(pool.map(fill, local))
            own.result()
    except BaseException as error:
        errors.append(error)
    for rank in range(messages.size):
        if rank != messages.rank:
            send(rank, lambda: [plan.pickle_part(rank)])  # noqa: B023  (called at once)
            if plan.nbytes[rank] and rank not in local:
                send(rank, lambda: plan.iter_file(rank))  # noqa: B023
    if errors:
        raise errors[0]


def _receive(
    messages: CommunicatorBase,
    root: int,
    file: SharedFile | None,
    unsplittable: list[np.ndarray],
    is_local: bool,
) -> Any:
    """Return this rank's part; None if the root has failed.

    Args:
        messages: the communicator that the root sends on.
        root: its rank.
        file: for this rank's arrays, if there are any.
        unsplittable: pickles of the data sets that the part refers to.
        is_local: whether the root fills the file.
    """
    if is_local and file is not None:
        with watch_call(_OPERATION):
            file.wait_until_unlocked()  # asleep: in a receive it would keep a core busy
    payload = bytearray()
    received = _Blocks(messages, root)
    for block in received:
        payload += block.data
    if is_local or file is None:
        rows = None
    else:
        rows = _Blocks(messages, root)
        _, error = capture_error(partial(file.write, rows))
        for _ in rows:  # what is left is received, even if it can't be written
            pass
        if error is not None:
            raise error
    if not received.complete or (rows is not None and not rows.complete):
        return None
    return unpickle_part(np.frombuffer(payload, np.uint8), file, unsplittable)


class _Blocks:
    """Receives blocks of bytes (uint8, 1-D) until the root says whether these are all.

    Attributes:
        complete: whether it has said so, and that these are all.
    """

    def __init__(self, messages: CommunicatorBase, root: int) -> None:
        self._messages = messages
        self._root = root
        self._ended = self.complete = False

    def __iter__(self) -> Iterator[np.ndarray]:
        while not self._ended:
            block = self._messages.recv(self._root, 0)
            if block.dtype == np.uint8:
                yield block
            else:
                self._ended, self.complete = True, bool(block[0])
