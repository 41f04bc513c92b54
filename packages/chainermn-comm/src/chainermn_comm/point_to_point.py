"""Sends and receives one message between two ranks."""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from mpi4py import MPI

from . import messages
from .arrays import as_bytes
from .exchange import pieces
from .messages import NOTED, Message

# The first of MPI's messages holds a number, the lengths of frame and note, as much of these as
# fits, and of the arrays those that fit one after the other; most messages need no other. More
# than this is faster apart, where it isn't copied.
_FIRST_BYTES = 16 << 10
_START = struct.Struct("<qII")
_NUMBER, _LENGTHS = struct.Struct("<q"), struct.Struct("<II")
_written, _read, _START_BYTES = _NUMBER.pack, _START.unpack_from, _START.size

Forms = tuple[tuple[np.dtype, tuple[int, ...], bool], ...]


def in_one(number: int, note: bytes, arrays: tuple[Any, ...]) -> tuple[bytes, int] | None:
    """A message with a note as one of MPI's, as :func:`send` sends it, and its arrays' bytes.

    None where the arrays can't be sent as they are, or take more than one of MPI's messages.
    """
    forms = []
    for array in arrays:
        if type(array) is not np.ndarray:
            return None
        forms.append((array.dtype, array.shape, array.flags.c_contiguous))
    found = _noted_head(note, tuple(forms))
    if found is None:
        return None
    head, nbytes = found
    return b"".join([_written(number), head, *[array.tobytes() for array in arrays]]), nbytes


def send(
    message: Message,
    nbytes: int,
    comm: MPI.Intracomm,
    dest: int,
    tag: int,
    note: bytes = b"",
    number: int = 0,
) -> None:
    """Send the message, whose arrays have so many bytes; returns when they may be changed."""
    frame, arrays = message.frame(), message.arrays
    head = _START.pack(number, len(frame), len(note)) + frame + note
    first, apart = [head[:_FIRST_BYTES]], []
    room = _FIRST_BYTES - len(head)
    if nbytes <= room:  # nearly always
        first += [array.tobytes("A") for array in arrays]  # each in its own memory order
        comm.Send([b"".join(first), MPI.BYTE], dest, tag)
        return
    for array in arrays:
        if array.nbytes <= room:
            first.append(array.tobytes("A"))
            room -= array.nbytes
        else:
            apart.append(as_bytes(array))
    comm.Send([b"".join(first), MPI.BYTE], dest, tag)
    if len(head) > _FIRST_BYTES:
        comm.Send([head[_FIRST_BYTES:], MPI.BYTE], dest, tag)
    for piece in pieces(apart):
        comm.Send([piece, MPI.BYTE], dest, tag)


def recv(
    comm: MPI.Intracomm, source: int, tag: int
) -> tuple[str, tuple[np.ndarray, ...], Any, Any, bytes, int]:
    """Wait for a message of :func:`send` and receive the whole of it.

    Returns:
        Kind, arrays, scalars and on_gpu of a :class:`Message`, the note, and the number.
    """
    first = np.empty(_FIRST_BYTES, np.uint8)
    read = first.data
    comm.Recv([first, MPI.BYTE], source, tag)
    number, length, noted = _read(read)
    end = _START_BYTES + length + noted
    head = bytes(read[_START_BYTES:end])
    if end > _FIRST_BYTES:
        rest = np.empty(end - _FIRST_BYTES, np.uint8)
        comm.Recv([rest, MPI.BYTE], source, tag)
        head += rest.tobytes()
    kind, forms, scalars, on_gpu, note = _known(head, length) or _parsed(head, length)
    arrays = []
    for dtype, shape, order, size in forms:
        if end + size <= _FIRST_BYTES:
            array = np.ndarray(shape, dtype, first, end, order=order).copy(order)
            end += size
        else:
            array = np.empty(shape, dtype, order)
            for piece in pieces([as_bytes(array)]):
                comm.Recv([piece, MPI.BYTE], source, tag)
        arrays.append(array)
    return kind, tuple(arrays), scalars, on_gpu, note, number


# Loops send the same few notes with the same few forms of arrays again and again.


@lru_cache(maxsize=256)
def _noted_head(note: bytes, forms: Forms) -> tuple[bytes, int] | None:
    """What follows the number, before arrays of these forms, and the arrays' bytes."""
    if not all([contiguous and not dtype.hasobject for dtype, _, contiguous in forms]):
        return None
    frame = messages.framed(NOTED, forms, (), ())
    head = _LENGTHS.pack(len(frame), len(note)) + frame + note
    nbytes = sum([dtype.itemsize * math.prod(shape) for dtype, shape, _ in forms])
    return (head, nbytes) if _NUMBER.size + len(head) + nbytes <= _FIRST_BYTES else None


@lru_cache(maxsize=256)
def _known(head: bytes, length: int) -> Any:
    """What :func:`_parsed` returns; None for dtypes whose names the arrays' owner may change."""
    found = messages.unframed_once(head[:length])
    return found and (*found, head[length:])


def _parsed(head: bytes, length: int) -> Any:
    return *messages.unframed(head[:length]), head[length:]
