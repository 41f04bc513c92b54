"""Sends and receives one message between two ranks."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from operator import not_
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from ..arrays import as_bytes
from ..watchdog import CallRecorder
from . import messages
from .messages import NOTED, OBJECT, Message
from .transfer import PIECE_BYTES, pieces

# The first of MPI's messages holds a number, the lengths of frame and note, as much of these as
# fits, and of the arrays those that fit one after the other; most messages need no other. More
# than this is faster apart, where it isn't copied.
FIRST_BYTES = 64 << 10
START = struct.Struct("<qII")

# MPI's communicator, the other rank, and the tag.
Peer: TypeAlias = tuple[MPI.Intracomm, int, int]


def send(
    method: str,
    message: Message,
    peer: Peer,
    record: CallRecorder,
    label: str = "",
    note: bytes = b"",
    number: int = 0,
) -> None:
    """Send the message; returns when its arrays may be changed."""
    comm, dest, tag = peer
    frame, arrays = message.frame(), message.arrays
    head = START.pack(number, len(frame), len(note)) + frame + note
    fit = within(len(head), [array.nbytes for array in arrays])
    first: list[Any] = [head[:FIRST_BYTES], *map(as_bytes, compress(arrays, fit))]
    record.message(method, dest, tag, message.nbytes, label)
    try:
        comm.Send([b"".join(first), MPI.BYTE], dest, tag)
        if len(head) > FIRST_BYTES:
            comm.Send([head[FIRST_BYTES:], MPI.BYTE], dest, tag)
        send_apart(list(compress(arrays, map(not_, fit))), peer)
    finally:
        record.leave()


def recv(method: str, kinds: tuple[str, ...], peer: Peer, record: CallRecorder, mine: int) -> Any:
    """Receive a message of :func:`send`; returns its value.

    Raises:
        TypeError: it is of none of these kinds; the text names this rank.
    """
    comm, source, tag = peer
    first = np.empty(FIRST_BYTES, np.uint8)
    record.message(method, source, tag)
    try:
        comm.Recv([first, MPI.BYTE], source, tag)
        message, *_ = rest_of(first, peer)
        if message.kind not in kinds:
            raise unlike(method, message, mine, source)
        return message.value()
    finally:
        record.leave()


def send_apart(arrays: Sequence[np.ndarray], peer: Peer) -> None:
    """Send arrays after the first part of their message."""
    comm, dest, tag = peer
    for piece in pieces(map(as_bytes, arrays)):
        comm.Send([piece, MPI.BYTE], dest, tag)


def rest_of(first: np.ndarray, peer: Peer) -> tuple[Message, bytes, int]:
    """Receive the rest of a message of which this part has come; also its note and number."""
    comm, source, tag = peer
    number, length, noted = START.unpack_from(first.data)
    end = START.size + length + noted
    head = first[START.size : end].tobytes()
    if end > FIRST_BYTES:
        rest = np.empty(end - FIRST_BYTES, np.uint8)
        comm.Recv([rest, MPI.BYTE], source, tag)
        head += rest.tobytes()
    kind, forms, scalars, on_gpu = messages.unframed(head[:length])
    fit = within(end, [size for *_, size in forms])
    apart = recv_apart([form[:3] for form in compress(forms, map(not_, fit))], peer)
    arrays = []
    for (dtype, shape, order, size), fits in zip(forms, fit, strict=True):
        if fits:
            arrays.append(np.ndarray(shape, dtype, first, end, order=order).copy(order))
            end += size
        else:
            arrays.append(apart.pop(0))
    return Message(kind, tuple(arrays), scalars, on_gpu), head[length:], number


def recv_apart(
    forms: Sequence[tuple[np.dtype, tuple[int, ...], Any]], peer: Peer
) -> list[np.ndarray]:
    """New arrays of these dtypes, shapes and orders, with what :func:`send_apart` sends.

    Raises:
        MemoryError: there is none for them; what is sent is discarded, and the next message can
            be received.
    """
    comm, source, tag = peer
    try:
        arrays = [messages.room(*form) for form in forms]
    except MemoryError:
        for dtype, shape, _ in forms:
            for _ in range(0, dtype.itemsize * math.prod(shape), PIECE_BYTES):
                with suppress(MPI.Exception):  # that it is longer
                    comm.Recv([bytearray(1), MPI.BYTE], source, tag)
        raise
    for piece in pieces(map(as_bytes, arrays)):
        comm.Recv([piece, MPI.BYTE], source, tag)
    return arrays


def within(start: int, sizes: list[int]) -> list[bool]:
    """For each array of so many bytes, whether it follows in the first of MPI's messages."""
    found = []
    for size in sizes:
        fits = start + size <= FIRST_BYTES
        found.append(fits)
        start += size * fits
    return found


def unlike(method: str, message: Message, mine: int, source: int) -> TypeError:
    """What is said of a message that isn't received as it was sent."""
    what, way = {
        OBJECT: ("an object", "_obj"),
        NOTED: ("a note with arrays (as of functions.send)", "_noted"),
    }.get(message.kind, ("an array", ""))
    return TypeError(
        f"rank {mine}: {method} got {what} that rank {source} sent with send{way} "
        f"(now discarded); receive it with recv{way}"
    )
