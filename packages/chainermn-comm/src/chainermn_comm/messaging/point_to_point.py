"""Sends and receives one message between two ranks.

The first of MPI's messages holds the message id, the lengths of header and metadata, as much of
these as fits, and the data of those arrays that fit after them; most messages need no other. Arrays
that don't fit follow out of line, where they aren't copied.

Messages with metadata take a fast path: loops send the same few metadata with the same few array
specs again and again, so all that follows from these is computed once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import Any, TypeAlias

import numpy as np
from mpi4py import MPI

from ..arrays import as_bytes
from ..watchdog import Record
from . import messages
from .messages import OBJECT, WITH_METADATA, ArraySpec, Message
from .transfer import MAX_MESSAGE_BYTES, split_large

# The size of the first of MPI's messages. Longer ones are faster out of line.
INLINE_BYTES = 64 << 10
PREFIX = struct.Struct("<qII")  # message id, length of the header, length of the metadata
_MESSAGE_ID, _LENGTHS = struct.Struct("<q"), struct.Struct("<II")
# Global names save the fast path some attribute look-ups.
_pack_message_id, _unpack_prefix, _PREFIX_BYTES = _MESSAGE_ID.pack, PREFIX.unpack_from, PREFIX.size

# MPI's communicator, the other rank, and the tag.
Peer: TypeAlias = tuple[MPI.Intracomm, int, int]


def send(
    method: str,
    message: Message,
    peer: Peer,
    record: Record,
    label: str = "",
    metadata: bytes = b"",
    message_id: int = 0,
) -> None:
    """Send the message; return when its arrays may be changed.

    Args:
        method: the method of the communicator, for the watchdog's reports.
        message: what is sent.
        peer: to whom.
        record: where the call is recorded.
        label: what the call is made for, for the watchdog's reports.
        metadata: bytes beside the arrays.
        message_id: 64 bits, signed.
    """
    comm, dest, tag = peer
    header, arrays = message.header(), message.arrays
    head = PREFIX.pack(message_id, len(header), len(metadata)) + header + metadata
    fit = fits_inline(len(head), [array.nbytes for array in arrays])
    inline: list[Any] = [head[:INLINE_BYTES], *map(as_bytes, compress(arrays, fit))]
    record.message(method, dest, tag, message.nbytes, label)
    try:
        comm.Send([b"".join(inline), MPI.BYTE], dest, tag)
        if len(head) > INLINE_BYTES:
            comm.Send([head[INLINE_BYTES:], MPI.BYTE], dest, tag)
        _send_out_of_line(compress(arrays, map(not_, fit)), peer)
    finally:
        record.leave()


def recv(method: str, kinds: tuple[str, ...], peer: Peer, record: Record, rank: int) -> Any:
    """Receive a message of :func:`send`; return its value.

    Args:
        method: the method of the communicator, for the watchdog's reports and errors.
        kinds: the kinds of messages that it takes.
        peer: from whom.
        record: where the call is recorded.
        rank: this rank's number, for errors.

    Raises:
        TypeError: the message is of none of these kinds; it is discarded.
    """
    comm, source, tag = peer
    inline = np.empty(INLINE_BYTES, np.uint8)
    record.message(method, source, tag)
    try:
        comm.Recv([inline, MPI.BYTE], source, tag)
        message, *_ = _recv_rest(inline, peer)
        if message.kind not in kinds:
            raise _wrong_kind(method, message, rank, source)
        return message.value()
    finally:
        record.leave()


def send_with_metadata(
    metadata: bytes,
    arrays: tuple[Any, ...],
    message_id: int,
    peer: Peer,
    label: str,
    record: Record,
    rank: int,
) -> None:
    """Send arrays with metadata; return when the arrays may be changed.

    Args:
        metadata: bytes beside the arrays.
        arrays: as :meth:`CommunicatorBase.send` takes a tuple of them.
        message_id: 64 bits, signed.
        peer: to whom.
        label: what the call is made for, for the watchdog's reports.
        record: where the call is recorded.
        rank: this rank's number, for errors.

    Raises:
        struct.error: the message id has more than 64 bits.
        TypeError: one of the arrays can't be sent.
    """
    comm, dest, tag = peer
    head = None
    if len(arrays) == 1 and type(array := arrays[0]) is np.ndarray:  # nearly always
        head = _encode(metadata, ((array.dtype, array.shape, array.flags.c_contiguous),))
    elif all([type(array) is np.ndarray for array in arrays]):
        specs = tuple([(array.dtype, array.shape, array.flags.c_contiguous) for array in arrays])
        head = _encode(metadata, specs)
    if head is None:
        message = messages.of_array(tuple(arrays), rank)._replace(kind=WITH_METADATA)
        send("send", message, peer, record, label, metadata, message_id)
        return
    encoded, out_of_line, nbytes = head
    inline = compress(arrays, map(not_, out_of_line)) if out_of_line else arrays
    first = b"".join((_pack_message_id(message_id), encoded, *inline))
    record.message("send", dest, tag, nbytes, label)
    try:
        comm.Send([first, MPI.BYTE], dest, tag)
        if out_of_line:
            _send_out_of_line(compress(arrays, out_of_line), peer)
    finally:
        record.leave()


def recv_with_metadata(
    peer: Peer, label: str, record: Record, rank: int
) -> tuple[bytes, tuple[Any, ...], int]:
    """Receive a message with metadata.

    Args:
        peer: from whom.
        label: what the call is made for, for the watchdog's reports.
        record: where the call is recorded.
        rank: this rank's number, for errors.

    Returns:
        The metadata, the arrays, and the message id.

    Raises:
        TypeError: the message has no metadata; it is discarded.
    """
    comm, source, tag = peer
    inline = np.empty(INLINE_BYTES, np.uint8)
    memory = inline.data
    record.message("recv", source, tag, 0, label)
    try:
        comm.Recv([inline, MPI.BYTE], source, tag)
        message_id, header_bytes, metadata_bytes = _unpack_prefix(memory)
        end = _PREFIX_BYTES + header_bytes + metadata_bytes
        decoded = None
        if end <= INLINE_BYTES:
            decoded = _decode(bytes(memory[_PREFIX_BYTES:end]), header_bytes)
        if decoded is None:
            message, metadata, message_id = _recv_rest(inline, peer)
            if message.kind != WITH_METADATA:
                raise _wrong_kind("recv_noted", message, rank, source)
            return metadata, message.value(), message_id
        metadata, places, out_of_line = decoded  # nearly always
        arrays = _recv_out_of_line(out_of_line, peer) if out_of_line else []
        for index, (dtype, shape, start) in enumerate(places):
            if start:
                arrays.insert(index, np.ndarray(shape, dtype, memory, start).copy())
        return metadata, tuple(arrays), message_id
    finally:
        record.leave()


def fits_inline(start: int, sizes: Sequence[int]) -> list[bool]:
    """Return for each array whether its data are in the first of MPI's messages.

    Args:
        start: bytes before the first array.
        sizes: bytes of each array.
    """
    fit = []
    for size in sizes:
        fits = start + size <= INLINE_BYTES
        fit.append(fits)
        start += size * fits
    return fit


def _send_out_of_line(arrays: Any, peer: Peer) -> None:
    comm, dest, tag = peer
    for array in arrays:
        for piece in split_large(as_bytes(array)):
            comm.Send([piece, MPI.BYTE], dest, tag)


def _recv_rest(inline: np.ndarray, peer: Peer) -> tuple[Message, bytes, int]:
    """Receive what follows the first part; return the message, its metadata and its id."""
    comm, source, tag = peer
    message_id, header_bytes, metadata_bytes = PREFIX.unpack_from(inline.data)
    end = PREFIX.size + header_bytes + metadata_bytes
    head = inline[PREFIX.size : end].tobytes()
    if end > INLINE_BYTES:
        rest = np.empty(end - INLINE_BYTES, np.uint8)
        comm.Recv([rest, MPI.BYTE], source, tag)
        head += rest.tobytes()
    kind, specs, scalars, on_gpu = messages.decode_header(head[:header_bytes])
    fit = fits_inline(end, [size for *_, size in specs])
    out_of_line = _recv_out_of_line([spec[:3] for spec in compress(specs, map(not_, fit))], peer)
    arrays = []
    for (dtype, shape, order, size), fits in zip(specs, fit, strict=True):
        if fits:
            arrays.append(np.ndarray(shape, dtype, inline, end, order=order).copy(order))
            end += size
        else:
            arrays.append(out_of_line.pop(0))
    return Message(kind, tuple(arrays), scalars, on_gpu), head[header_bytes:], message_id


def _recv_out_of_line(
    specs: Sequence[tuple[np.dtype, tuple[int, ...], Any]], peer: Peer
) -> list[np.ndarray]:
    """Receive new arrays of these dtypes, shapes and orders.

    Raises:
        MemoryError: there is none for them; their data are discarded, and the next message can be
            received.
    """
    comm, source, tag = peer
    try:
        arrays = [messages.empty_array(*spec) for spec in specs]
    except MemoryError:
        for dtype, shape, _ in specs:
            for _ in range(0, dtype.itemsize * math.prod(shape), MAX_MESSAGE_BYTES):
                with suppress(MPI.Exception):  # MPI_ERR_TRUNCATE
                    comm.Recv([bytearray(1), MPI.BYTE], source, tag)
        raise
    for array in arrays:
        for piece in split_large(as_bytes(array)):
            comm.Recv([piece, MPI.BYTE], source, tag)
    return arrays


def _wrong_kind(method: str, message: Message, rank: int, source: int) -> TypeError:
    what, suffix = {
        OBJECT: ("an object", "_obj"),
        WITH_METADATA: ("a note with arrays (as of functions.send)", "_noted"),
    }.get(message.kind, ("an array", ""))
    return TypeError(
        f"rank {rank}: {method} got {what} that rank {source} sent with send{suffix} "
        f"(now discarded); receive it with recv{suffix}"
    )


class _SlowPathError(Exception):
    """Arrays can't take the fast path. An exception isn't cached, so no long metadata are kept."""


def _encode(
    metadata: bytes, specs: tuple[ArraySpec, ...]
) -> tuple[bytes, tuple[bool, ...], int] | None:
    try:
        return _encode_cached(metadata, specs)
    except _SlowPathError:
        return None


@lru_cache(maxsize=256)
def _encode_cached(
    metadata: bytes, specs: tuple[ArraySpec, ...]
) -> tuple[bytes, tuple[bool, ...], int]:
    """Return what follows the message id, which arrays are out of line, and the data's bytes."""
    if not all([contiguous and not dtype.hasobject for dtype, _, contiguous in specs]):
        raise _SlowPathError
    header = messages.encode_header(WITH_METADATA, specs, (), ())
    head = _LENGTHS.pack(len(header), len(metadata)) + header + metadata
    start = _MESSAGE_ID.size + len(head)
    if start > INLINE_BYTES:
        raise _SlowPathError
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape, _ in specs]
    fit = fits_inline(start, sizes)
    return head, () if all(fit) else tuple(map(not_, fit)), sum(sizes)


@lru_cache(maxsize=256)
def _decode(head: bytes, header_bytes: int) -> tuple[bytes, list[Any], list[Any]] | None:
    """Return what is known of a message from its header and metadata.

    Returns:
        The metadata; each array's dtype, shape, and where it begins in the first part (0 if it is
        out of line); dtype, shape and order of those out of line. None for the slow path.
    """
    found = messages.decode_header_cached(head[:header_bytes])
    if found is None:
        return None
    kind, specs, scalars, on_gpu = found
    is_plain = not scalars and not on_gpu and all([order == "C" for _, _, order, _ in specs])
    if kind != WITH_METADATA or not is_plain:
        return None
    start = _PREFIX_BYTES + len(head)
    fit = fits_inline(start, [size for *_, size in specs])
    places, out_of_line = [], []
    for (dtype, shape, order, size), fits in zip(specs, fit, strict=True):
        places.append((dtype, shape, start if fits else 0))
        if fits:
            start += size
        else:
            out_of_line.append((dtype, shape, order))
    return head[header_bytes:], places, out_of_line
