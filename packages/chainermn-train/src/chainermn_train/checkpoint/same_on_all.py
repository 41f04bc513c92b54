"""State that is the same on all ranks is saved once: found, and divided over the ranks."""

from __future__ import annotations

import zlib

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked
from .checked_file import State


def names_alike(comm: CommunicatorBase, state: State, names: list[str]) -> set[str]:
    """Return the names of the arrays that have the same bits on all ranks (collective)."""
    if comm.size == 1:
        return set(names)
    rows = allgather_checked(
        comm, "checkpoint", lambda: [_checksum(state.get(name)) for name in names]
    )
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return {name for name, checksums in columns if len(set(checksums)) == 1}


def _checksum(array: np.ndarray | None) -> int | None:
    if array is None:
        return None
    form = zlib.crc32(f"{array.dtype} {array.shape}".encode())
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return zlib.crc32(data.data, form)


def divide(
    comm: CommunicatorBase, state: State, names: list[str], alike: set[str]
) -> tuple[State, State]:
    """Return this rank's part of the arrays that are ``alike``, and the arrays of its own.

    Ranks take turns in the order of ``names``.
    """
    dealt = [name for name in names if name in alike][comm.rank :: comm.size]
    # A rank may lack an array that it had when all were alike.
    shared = {name: state[name] for name in dealt if name in state}
    own = {name: array for name, array in state.items() if name not in alike}
    return shared, own
