"""Sends and receives one message between two ranks."""

from __future__ import annotations

import struct

import numpy as np
from mpi4py import MPI

from . import messages
from .arrays import as_bytes
from .exchange import pieces
from .messages import Message

# The first of MPI's messages holds the lengths of frame and note, as much of these as fits, and
# of the arrays those that fit one after the other; most messages need no other. More than this
# is faster apart, where it isn't copied.
_FIRST_BYTES = 16 << 10
_LENGTHS = struct.Struct("<II")


def send(message: Message, nbytes: int, comm: MPI.Intracomm, dest: int, tag: int) -> None:
    """Send the message, whose arrays have so many bytes; returns when they may be changed."""
    frame = message.frame()
    head = _LENGTHS.pack(len(frame), len(message.note)) + frame + message.note
    first, apart, arrays = [head[:_FIRST_BYTES]], [], message.arrays
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


def recv(comm: MPI.Intracomm, source: int, tag: int) -> Message:
    """Wait for a message of :func:`send` and receive the whole of it."""
    first = np.empty(_FIRST_BYTES, np.uint8)
    comm.Recv([first, MPI.BYTE], source, tag)
    read = first.data
    length, noted = _LENGTHS.unpack_from(read)
    start, end = _LENGTHS.size + length, _LENGTHS.size + length + noted
    head = bytes(read[:end])
    if end > _FIRST_BYTES:
        rest = np.empty(end - _FIRST_BYTES, np.uint8)
        comm.Recv([rest, MPI.BYTE], source, tag)
        head += rest.tobytes()
    kind, forms, scalars, on_gpu = messages.unframed(head[_LENGTHS.size : start])
    note = head[start:]
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
    return Message(kind, tuple(arrays), scalars, on_gpu, note)
