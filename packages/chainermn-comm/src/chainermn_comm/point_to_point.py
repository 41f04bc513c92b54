"""Sends and receives one message between two ranks."""

from __future__ import annotations

import struct

import numpy as np
from mpi4py import MPI

from . import messages
from .arrays import as_bytes
from .exchange import pieces
from .messages import Message

# The first of MPI's messages holds the frame's length, as much of the frame as fits, and of the
# arrays those that fit one after the other; most messages need no other. More than this is
# faster apart, where it isn't copied.
_FIRST_BYTES = 16 << 10
_LENGTH = struct.Struct("<I")
_ROOM_BYTES = _FIRST_BYTES - _LENGTH.size


def send(message: Message, comm: MPI.Intracomm, dest: int, tag: int) -> None:
    """Send the message; returns when its buffers may be changed."""
    frame = message.frame()
    first, apart = [_LENGTH.pack(len(frame)), frame[:_ROOM_BYTES]], []
    room = _ROOM_BYTES - len(frame)
    for array in message.arrays:
        if array.nbytes <= room:
            first.append(array.tobytes("A"))  # in its own memory order
            room -= array.nbytes
        else:
            apart.append(as_bytes(array))
    comm.Send([b"".join(first), MPI.BYTE], dest, tag)
    if len(frame) > _ROOM_BYTES:
        comm.Send([frame[_ROOM_BYTES:], MPI.BYTE], dest, tag)
    for piece in pieces(apart):
        comm.Send([piece, MPI.BYTE], dest, tag)


def recv(comm: MPI.Intracomm, source: int, tag: int) -> Message:
    """Wait for a message of :func:`send` and receive the whole of it."""
    first = np.empty(_FIRST_BYTES, np.uint8)
    comm.Recv([first, MPI.BYTE], source, tag)
    (length,) = _LENGTH.unpack_from(first.data)
    end = _LENGTH.size + length
    frame = first[_LENGTH.size : end].tobytes()
    if length > _ROOM_BYTES:
        rest = np.empty(length - _ROOM_BYTES, np.uint8)
        comm.Recv([rest, MPI.BYTE], source, tag)
        frame += rest.tobytes()
    kind, forms, scalars, on_gpu = messages.unframed(frame)
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
    return Message(kind, tuple(arrays), scalars, on_gpu)
