"""Which arrays are the same on all ranks, and which rank saves each of them."""

from __future__ import annotations

import zlib

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked
from .checked_file import State, bytes_of


def names_alike(comm: CommunicatorBase, state: State) -> list[str]:
    """Return the names of the arrays that have the same bits on all ranks (collective).

    The list is the same on all ranks, and begins with the largest array.
    """
    names = comm.bcast_obj(by_size(state))
    if comm.size == 1:
        return list(names)
    rows = allgather_checked(
        comm, "checkpoint", lambda: [_checksum(state.get(name)) for name in names]
    )
    return [name for i, name in enumerate(names) if len({row[i] for row in rows}) == 1]


def by_size(state: State) -> list[str]:
    """Return the names of arrays, the largest array first, in one order for the same arrays."""
    return sorted(state, key=lambda name: (-state[name].nbytes, name))


def _checksum(array: np.ndarray | None) -> int | None:
    if array is None:
        return None
    form = zlib.crc32(f"{array.dtype} {array.shape}".encode())
    return zlib.crc32(bytes_of(array), form)


def divide(
    comm: CommunicatorBase, state: State, alike: list[str]
) -> tuple[State, State]:
    """Return this rank's part of the arrays that are ``alike``, and the arrays of its own.

    Ranks take turns at the names in ``alike``. A rank may lack an array that it had
    when the names were found.
    """
    own = dict(state)
    for name in alike:
        own.pop(name, None)
    turns = alike[comm.rank :: comm.size]
    return {name: state[name] for name in turns if name in state}, own
