"""What is the same on all ranks is saved once: found, divided over the ranks, and merged."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import compress
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from .checked_file import Head, RankFile, State


def names_alike(comm: CommunicatorBase, state: State) -> list[str]:
    """Return the names of what has the same bits on all ranks, in one order (collective)."""
    if comm.size == 1:
        return list(state)
    own = {name: _form_and_checksum(array) for name, array in state.items()}
    table: dict[str, Any] = comm.bcast_obj(own)
    alike = bytes([own.get(name, "") == form for name, form in table.items()])
    rows = comm.handshake("checkpoint", payload=alike)
    return list(compress(table, map(all, zip(*rows, strict=True))))


def _form_and_checksum(array: np.ndarray | None) -> Any:
    if array is None:
        return None
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return str(array.dtype), array.shape, zlib.crc32(data.data)


def shard(head: Head, state: State, alike: Iterable[str]) -> RankFile:
    """Return what a rank saves: its own, and its part of what all ranks have ``alike``.

    The largest array goes to the rank that has the fewest bytes yet, and so on.
    """
    shared = {name: state[name] for name in alike if name in state}
    part: State = {}
    bytes_of_ranks = [0] * head.size
    for name in sorted(shared, key=lambda name: -_nbytes(shared[name])):
        to = bytes_of_ranks.index(min(bytes_of_ranks))
        bytes_of_ranks[to] += _nbytes(shared[name])
        if to == head.rank:
            part[name] = shared[name]
    own = {name: array for name, array in state.items() if name not in shared}
    return RankFile(head, part, own)


def _nbytes(array: np.ndarray | None) -> int:
    return 0 if array is None else array.nbytes


def merge(files: Iterable[RankFile]) -> State:
    """Return what all ranks have alike."""
    return {name: array for file in files for name, array in file.shared.items()}
