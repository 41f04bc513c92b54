"""What is the same on all ranks is saved once: divided over the ranks, found, and merged."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked
from .checked_file import Head, RankFile, State


def names_alike(comm: CommunicatorBase, state: State, names: list[str]) -> set[str]:
    """Return the names of what has the same bits on all ranks (collective)."""
    if comm.size == 1:
        return set(names)

    def checksums() -> list[int | None]:
        return [_checksum(state[name]) if name in state else None for name in names]

    rows = allgather_checked(comm, "checkpoint", checksums)
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return {name for name, column in columns if len(set(column)) == 1}


def _checksum(array: np.ndarray) -> int:
    form = zlib.crc32(f"{array.dtype} {array.shape}".encode())
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return zlib.crc32(data.data, form)


def rank_file(head: Head, state: State, names: list[str], alike: set[str]) -> RankFile:
    """Return what a rank saves: its own, and its part of what all ranks have ``alike``.

    Ranks take turns at it, in the order of ``names``.
    """
    dealt = [name for name in names if name in alike][head.rank :: head.size]
    shared = {name: state[name] for name in dealt if name in state}
    own = {name: array for name, array in state.items() if name not in alike}
    return RankFile(head, shared, own)


def merge(files: Iterable[RankFile]) -> State:
    """Return what all ranks have alike."""
    return {name: array for file in files for name, array in file.shared.items()}
