"""Messages with a note between two ranks, as short and quick as Python makes them.

They are those of :mod:`point_to_point`. Loops send the same few notes with the same few forms of
arrays again and again; so all that follows from these is worked out once.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import Any

import numpy as np
from mpi4py import MPI

from ..watchdog import CallRecorder
from . import messages
from .messages import NOTED
from .point_to_point import (
    FIRST_BYTES,
    START,
    Peer,
    recv_apart,
    rest_of,
    send_apart,
    unlike,
    within,
)

_NUMBER, _LENGTHS = struct.Struct("<q"), struct.Struct("<II")
_written, _read, _START_BYTES = _NUMBER.pack, START.unpack_from, START.size

Forms = tuple[tuple[np.dtype, tuple[int, ...], bool], ...]


def send(
    note: bytes, arrays: tuple[Any, ...], number: int, peer: Peer, label: str, record: CallRecorder
) -> bool:
    """Send the message; False, and nothing was sent, if the arrays can't be sent as they are.

    Raises:
        struct.error: the number has more than 64 bits.
    """
    comm, dest, tag = peer
    if len(arrays) == 1 and type(array := arrays[0]) is np.ndarray:  # nearly always
        forms: Forms = ((array.dtype, array.shape, array.flags.c_contiguous),)
    elif all([type(array) is np.ndarray for array in arrays]):
        forms = tuple([(array.dtype, array.shape, array.flags.c_contiguous) for array in arrays])
    else:
        return False
    try:
        head, apart, nbytes = _packed(note, forms)
    except _UnfitError:
        return False
    together = compress(arrays, map(not_, apart)) if apart else arrays
    first = b"".join((_written(number), head, *together))
    record.message("send", dest, tag, nbytes, label)
    try:
        comm.Send([first, MPI.BYTE], dest, tag)
        if apart:
            send_apart(list(compress(arrays, apart)), peer)
    finally:
        record.leave()
    return True


def recv(
    peer: Peer, label: str, record: CallRecorder, mine: int
) -> tuple[bytes, tuple[Any, ...], int]:
    """Receive a message with a note, also of :func:`point_to_point.send`: note, arrays, number.

    Raises:
        TypeError: it has none; the text names this rank.
    """
    comm, source, tag = peer
    first = np.empty(FIRST_BYTES, np.uint8)
    read = first.data
    record.message("recv", source, tag, 0, label)
    try:
        comm.Recv([first, MPI.BYTE], source, tag)
        number, length, noted = _read(read)
        end = _START_BYTES + length + noted
        known = _unpacked(bytes(read[_START_BYTES:end]), length) if end <= FIRST_BYTES else None
        if known is None:
            message, note, number = rest_of(first, peer)
            if message.kind != NOTED:
                raise unlike("recv_noted", message, mine, source)
            return note, message.value(), number
        note, forms, apart = known  # nearly always
        arrays = recv_apart(apart, peer) if apart else []
        for index, (dtype, shape, start) in enumerate(forms):
            if start:
                arrays.insert(index, np.ndarray(shape, dtype, read, start).copy())
        return note, tuple(arrays), number
    finally:
        record.leave()


class _UnfitError(Exception):
    """Something can't be sent so. To return that would keep it, with a note of any length."""


@lru_cache(maxsize=256)
def _packed(note: bytes, forms: Forms) -> tuple[bytes, tuple[bool, ...], int]:
    """What follows the number, which arrays don't follow that, if any, and the bytes of all."""
    if not all([contiguous and not dtype.hasobject for dtype, _, contiguous in forms]):
        raise _UnfitError
    frame = messages.framed(NOTED, forms, (), ())
    head = _LENGTHS.pack(len(frame), len(note)) + frame + note
    start = _NUMBER.size + len(head)
    if start > FIRST_BYTES:
        raise _UnfitError
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape, _ in forms]
    fit = within(start, sizes)
    return head, () if all(fit) else tuple(map(not_, fit)), sum(sizes)


@lru_cache(maxsize=256)
def _unpacked(head: bytes, length: int) -> tuple[bytes, list[Any], list[Any]] | None:
    """The note; each array's dtype, shape, and where it begins; forms of those that come apart."""
    found = messages.unframed_once(head[:length])
    if found is None:
        return None
    kind, forms, scalars, on_gpu = found
    if kind != NOTED or scalars or on_gpu or not all([order == "C" for _, _, order, _ in forms]):
        return None
    start = _START_BYTES + len(head)
    fit = within(start, [size for *_, size in forms])
    places, apart = [], []
    for (dtype, shape, order, size), fits in zip(forms, fit, strict=True):
        places.append((dtype, shape, start if fits else 0))
        if fits:
            start += size
        else:
            apart.append((dtype, shape, order))
    return head[length:], places, apart
