"""What is the same on all ranks is saved once: found, dealt over the ranks, and put together."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from .shards import DamagedError, Piece, Shard, State

# Smaller arrays lie in one file.
_LEAST_PIECE_BYTES = 64 << 10


def deal(comm: CommunicatorBase, state: State, same: Iterable[str]) -> Shard:
    """Return what this rank saves, in views, where all have the ``same`` names, in one order."""
    same = [name for name in same if name in state]
    shard = Shard(
        own={name: array for name, array in state.items() if name not in same}
    )
    total = sum(array.nbytes for name in same if (array := state[name]) is not None)
    first, last = (total * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    begin = 0  # of the array, in all bytes
    for name in same:
        array = state[name]
        nbytes = 0 if array is None else array.nbytes
        end = begin + nbytes
        if (
            array is None
            or nbytes < _LEAST_PIECE_BYTES
            or (first <= begin and end <= last)
        ):
            if first <= begin < last or (begin == total and comm.rank == 0):
                shard.shared[name] = array
        elif begin < last and first < end:
            # Rounded alike on the ranks before and after.
            start, stop = (
                min(array.size, max(0, -(-(bound - begin) // array.itemsize)))
                for bound in (first, last)
            )
            if start < stop:
                data = np.ascontiguousarray(array).reshape(-1)[start:stop]
                shard.pieces[name] = Piece(array.shape, start, data)
        begin = end
    return shard


def same_on_all(comm: CommunicatorBase, state: State) -> list[str]:
    """Return the names of what has the same bits on all ranks, in one order (collective)."""
    if comm.size == 1:
        return list(state)
    own = {name: _form_and_checksum(array) for name, array in state.items()}
    table: dict[str, Any] = comm.bcast_obj(own)
    alike = np.packbits([own.get(name, "") == form for name, form in table.items()])
    rows = comm.handshake("checkpoint", payload=alike.tobytes())
    same = np.bitwise_and.reduce([np.frombuffer(row, np.uint8) for row in rows])
    return [
        name
        for name, is_same in zip(table, np.unpackbits(same), strict=False)
        if is_same
    ]


def _form_and_checksum(array: np.ndarray | None) -> Any:
    if array is None:
        return None
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return str(array.dtype), array.shape, zlib.crc32(data.data)


def put_together(shards: Iterable[Shard]) -> State:
    """Return what all ranks saved together; DamagedError where some of it is in no shard."""
    state: State = {}
    filled: dict[str, int] = {}
    for shard in shards:
        state.update(shard.shared)
        for name, (shape, start, data) in shard.pieces.items():
            if name not in filled:
                state[name], filled[name] = np.empty(shape, data.dtype), 0
            array = state[name]
            assert array is not None
            array.reshape(-1)[start : start + data.size] = data
            filled[name] += data.size
    for name, size in filled.items():
        array = state[name]
        if array is None or size != array.size:
            raise DamagedError(f"{name!r} isn't whole: some elements are in no file")
    return state
