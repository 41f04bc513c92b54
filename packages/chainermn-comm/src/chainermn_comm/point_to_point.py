"""Sends and receives one message between two ranks."""

from __future__ import annotations

import struct

import numpy as np
from mpi4py import MPI

from . import messages
from .exchange import pieces
from .messages import Message

# The frame's length and its first bytes travel first; few frames need a second message.
_LENGTH = struct.Struct("<I")
_HEADER_BYTES = 128
_INLINE_BYTES = _HEADER_BYTES - _LENGTH.size


def send(message: Message, comm: MPI.Intracomm, dest: int, tag: int) -> None:
    """Send the message; returns when its buffers may be changed."""
    frame = message.frame()
    header = _LENGTH.pack(len(frame)) + frame[:_INLINE_BYTES]
    comm.Send([header.ljust(_HEADER_BYTES, b"\0"), MPI.BYTE], dest, tag)
    if len(frame) > _INLINE_BYTES:
        comm.Send([frame[_INLINE_BYTES:], MPI.BYTE], dest, tag)
    for piece in pieces(message.buffers):
        comm.Send([piece, MPI.BYTE], dest, tag)


def recv(comm: MPI.Intracomm, source: int, tag: int) -> Message:
    """Wait for a message of :func:`send` and receive the whole of it."""
    header = bytearray(_HEADER_BYTES)
    comm.Recv([header, MPI.BYTE], source, tag)
    (length,) = _LENGTH.unpack_from(header)
    frame = bytes(header[_LENGTH.size :][:length])
    if length > _INLINE_BYTES:
        rest = np.empty(length - _INLINE_BYTES, np.uint8)
        comm.Recv([rest, MPI.BYTE], source, tag)
        frame += rest.tobytes()
    message = messages.allocate(frame)
    for piece in pieces(message.buffers):
        comm.Recv([piece, MPI.BYTE], source, tag)
    return message
