"""Sends and receives one message between two ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from . import messages
from .arrays import as_bytes
from .exchange import pieces
from .messages import Message

# The first of MPI's messages holds a number, the lengths of frame and note, as much of these as
# fits, and of the arrays those that fit one after the other; most messages need no other. More
# than this is faster apart, where it isn't copied.
FIRST_BYTES = 16 << 10
START = struct.Struct("<qII")


def send(
    message: Message, comm: MPI.Intracomm, dest: int, tag: int, note: bytes, number: int
) -> None:
    """Send the message; returns when its arrays may be changed."""
    frame, arrays = message.frame(), message.arrays
    head = START.pack(number, len(frame), len(note)) + frame + note
    fit = within(len(head), [array.nbytes for array in arrays])
    first = [head[:FIRST_BYTES], *[arrays[index].tobytes("A") for index in fit]]
    comm.Send([b"".join(first), MPI.BYTE], dest, tag)
    if len(head) > FIRST_BYTES:
        comm.Send([head[FIRST_BYTES:], MPI.BYTE], dest, tag)
    if len(fit) < len(arrays):
        apart = [array for index, array in enumerate(arrays) if index not in fit]
        send_apart(apart, comm, dest, tag)


def send_apart(arrays: Sequence[np.ndarray], comm: MPI.Intracomm, dest: int, tag: int) -> None:
    """Send arrays after the first part of their message."""
    for piece in pieces(map(as_bytes, arrays)):
        comm.Send([piece, MPI.BYTE], dest, tag)


def recv_rest(
    first: np.ndarray, comm: MPI.Intracomm, source: int, tag: int
) -> tuple[Message, bytes, int]:
    """Receive the rest of a message of :func:`send`, whose first part has come.

    Returns:
        The message, its note, and its number.
    """
    number, length, noted = START.unpack_from(first.data)
    end = START.size + length + noted
    head = first[START.size : end].tobytes()
    if end > FIRST_BYTES:
        rest = np.empty(end - FIRST_BYTES, np.uint8)
        comm.Recv([rest, MPI.BYTE], source, tag)
        head += rest.tobytes()
    kind, forms, scalars, on_gpu = messages.unframed(head[:length])
    arrays, apart = [], []
    for dtype, shape, order, size in forms:
        if end + size <= FIRST_BYTES:
            array = np.ndarray(shape, dtype, first, end, order=order).copy(order)
            end += size
        else:
            array = np.empty(shape, dtype, order)
            apart.append(array)
        arrays.append(array)
    recv_apart(apart, comm, source, tag)
    return Message(kind, tuple(arrays), scalars, on_gpu), head[length:], number


def recv_apart(arrays: Sequence[np.ndarray], comm: MPI.Intracomm, source: int, tag: int) -> None:
    """Fill arrays with what :func:`send_apart` sends."""
    for piece in pieces(map(as_bytes, arrays)):
        comm.Recv([piece, MPI.BYTE], source, tag)


def within(start: int, sizes: list[int]) -> tuple[int, ...]:
    """Of arrays of so many bytes those that follow in the first of MPI's messages."""
    found = []
    for index, size in enumerate(sizes):
        if start + size <= FIRST_BYTES:
            found.append(index)
            start += size
    return tuple(found)
