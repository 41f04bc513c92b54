"""Messages with a note between two ranks, as short and quick as Python makes them.

They are those of :mod:`point_to_point`. Loops send the same few notes with the same few forms of
arrays again and again; so all that follows from these is worked out once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from . import messages
from .messages import NOTED
from .point_to_point import FIRST_BYTES, START, within

_NUMBER, _LENGTHS = struct.Struct("<q"), struct.Struct("<II")
_written, _read, _START_BYTES = _NUMBER.pack, START.unpack_from, START.size

Forms = tuple[tuple[np.dtype, tuple[int, ...], bool], ...]


def packed(
    number: int, note: bytes, arrays: tuple[Any, ...]
) -> tuple[bytes, Sequence[np.ndarray], int] | None:
    """The first part of a message, arrays that go apart, and the bytes of all arrays.

    None where the arrays can't be sent as they are.
    """
    if len(arrays) == 1 and type(array := arrays[0]) is np.ndarray:  # nearly always
        known = _packed(note, ((array.dtype, array.shape, array.flags.c_contiguous),))
        if known is None:
            return None
        head, fit, nbytes = known
        if fit:
            return b"".join((_written(number), head, array.tobytes())), (), nbytes
        return _written(number) + head, arrays, nbytes
    if not all([type(array) is np.ndarray for array in arrays]):
        return None
    forms = [(array.dtype, array.shape, array.flags.c_contiguous) for array in arrays]
    known = _packed(note, tuple(forms))
    if known is None:
        return None
    head, fit, nbytes = known
    first = [array.tobytes() for index, array in enumerate(arrays) if index in fit]
    apart = [array for index, array in enumerate(arrays) if index not in fit]
    return b"".join((_written(number), head, *first)), apart, nbytes


def unpacked(
    read: memoryview,
) -> tuple[bytes, tuple[np.ndarray, ...], int, Sequence[np.ndarray]] | None:
    """Note, arrays and number of a message of which this is the first part.

    Also those of the arrays that come apart and are still to be filled. None for messages that
    :func:`packed` doesn't pack.
    """
    number, length, noted = _read(read)
    end = _START_BYTES + length + noted
    if end > FIRST_BYTES:
        return None
    known = _unpacked(bytes(read[_START_BYTES:end]), length)
    if known is None:
        return None
    note, forms, apart = known
    arrays = []
    for dtype, shape, start in forms:
        if start:
            arrays.append(np.ndarray(shape, dtype, read, start).copy())
        else:
            arrays.append(np.empty(shape, dtype))
    return note, tuple(arrays), number, [arrays[index] for index in apart] if apart else ()


@lru_cache(maxsize=256)
def _packed(note: bytes, forms: Forms) -> tuple[bytes, tuple[int, ...], int] | None:
    """What follows the number, which arrays follow that, and the bytes of all."""
    if not all([contiguous and not dtype.hasobject for dtype, _, contiguous in forms]):
        return None
    frame = messages.framed(NOTED, forms, (), ())
    head = _LENGTHS.pack(len(frame), len(note)) + frame + note
    start = _NUMBER.size + len(head)
    if start > FIRST_BYTES:
        return None
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape, _ in forms]
    return head, within(start, sizes), sum(sizes)


@lru_cache(maxsize=256)
def _unpacked(head: bytes, length: int) -> tuple[bytes, list[Any], list[int]] | None:
    """The note; each array's dtype, shape, and where it begins; those that begin nowhere here."""
    found = messages.unframed_once(head[:length])
    if found is None:
        return None
    kind, forms, scalars, on_gpu = found
    if kind != NOTED or scalars or on_gpu or not all([order == "C" for _, _, order, _ in forms]):
        return None
    start = _START_BYTES + len(head)
    fit = within(start, [size for *_, size in forms])
    places, apart = [], []
    for index, (dtype, shape, _, size) in enumerate(forms):
        places.append((dtype, shape, start if index in fit else 0))
        if index in fit:
            start += size
        else:
            apart.append(index)
    return head[length:], places, apart
