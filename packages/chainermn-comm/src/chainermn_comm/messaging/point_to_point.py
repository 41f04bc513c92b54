"""Sends and receives one message between two ranks.

The first of MPI's messages holds the message id, the lengths of header and metadata, as much of
these as fits, and the data of those arrays that fit after them; most messages need no other. Arrays
that don't fit follow out of line, where they aren't copied.

Loops send the same few metadata with the same few array specs again and again, so everything that
follows from these is computed once.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress
from operator import not_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from ..arithmetic import as_bytes
from ..errors import PeerError
from ..observers import CallObserver
from . import messages
from .messages import ERROR, OBJECT, TUPLE, WITH_METADATA, ArraySpec, Message, on_device
from .transfer import discard, split_large

# The size of the first of MPI's messages. Longer ones are faster out of line.
INLINE_BYTES = 64 << 10
# Metadata that are longer aren't cached.
CACHED_METADATA_BYTES = 1 << 10
_UINT8 = np.dtype(np.uint8)
PREFIX = struct.Struct("<qII")  # message id, length of the header, length of the metadata
_MESSAGE_ID, _LENGTHS = struct.Struct("<q"), struct.Struct("<II")
# Global names save attribute look-ups.
_pack_message_id, _unpack_prefix, _PREFIX_BYTES = _MESSAGE_ID.pack, PREFIX.unpack_from, PREFIX.size

# MPI's communicator, the other rank, and the tag.
Envelope: TypeAlias = tuple[MPI.Intracomm, int, int]


def send(
    method: str,
    message: Message,
    envelope: Envelope,
    observer: CallObserver,
    label: str = "",
    metadata: bytes = b"",
    message_id: int = 0,
) -> None:
    """Send the message; return when its arrays may be changed.

    The observer gets ``method``, a communicator's, and ``label``, what the call is for.
    """
    comm, dest, tag = envelope
    kind, arrays, scalars, on_gpu = message
    if len(arrays) == 1:  # nearly always
        (array,) = arrays
        specs: tuple[ArraySpec, ...] = ((array.dtype, array.shape, array.flags.c_contiguous),)
    else:
        specs = tuple([(array.dtype, array.shape, array.flags.c_contiguous) for array in arrays])
    encode = _encode if len(metadata) <= CACHED_METADATA_BYTES else _encode.__wrapped__
    head, out_of_line, all_c, nbytes = encode(kind, specs, scalars, on_gpu, metadata)
    inline: Iterable[Any] = compress(arrays, map(not_, out_of_line)) if out_of_line else arrays
    if not all_c:
        inline = map(as_bytes, inline)
    first = b"".join((_pack_message_id(message_id), head, *inline))
    observer.message(method, dest, tag, nbytes, label)
    try:
        if len(first) > INLINE_BYTES:  # the header or the metadata are long, and no array fits
            comm.Send([first[:INLINE_BYTES], MPI.BYTE], dest, tag)
            for piece in split_large(np.frombuffer(first, np.uint8, offset=INLINE_BYTES)):
                comm.Send([piece, MPI.BYTE], dest, tag)
        else:
            comm.Send([first, MPI.BYTE], dest, tag)
        if out_of_line:
            for array in compress(arrays, out_of_line):
                for piece in split_large(as_bytes(array)):
                    comm.Send([piece, MPI.BYTE], dest, tag)
    finally:
        observer.leave()


def recv(
    method: str, kinds: tuple[str, ...], envelope: Envelope, observer: CallObserver, label: str = ""
) -> tuple[bytes, Any, int]:
    """Receive a message of :func:`send`: its metadata, value and message id.

    Raises:
        CommunicationError: arrays that came from a GPU can't be put on one here.
        Exception: the header can't be decoded, as where this rank lacks the package of a dtype; the
            message is discarded.
        MemoryError: there is no memory for an array, or for long metadata; the message is discarded
            (unless its header alone is longer than ``INLINE_BYTES``).
        PeerError: the message holds an error of its sender instead.
        TypeError: the message is of none of these kinds; it is discarded.
    """
    comm, source, tag = envelope
    inline = np.empty(INLINE_BYTES, np.uint8)
    memory = inline.data
    observer.message(method, source, tag, 0, label)
    try:
        comm.Recv([inline, MPI.BYTE], source, tag)
        message_id, header_bytes, metadata_bytes = _unpack_prefix(memory)
        end = _PREFIX_BYTES + header_bytes + metadata_bytes
        head = bytes(memory[_PREFIX_BYTES:end])
        try:
            if end > INLINE_BYTES:
                (rest,) = _recv_arrays([(_UINT8, (end - INLINE_BYTES,), "C")], envelope)
                head += rest.tobytes()
                found = _decode(head, header_bytes)
            else:
                found = _decode_cached(head, header_bytes) or _decode(head, header_bytes)
        except Exception:
            _discard_out_of_line(head, header_bytes, end, envelope)
            raise
        kind, metadata, places, out_of_line, scalars, on_gpu, is_plain = found
        arrays = _recv_arrays(out_of_line, envelope) if out_of_line else []
        for index, (dtype, shape, order, start) in enumerate(places):
            if start and order is None:  # nearly always
                arrays.insert(index, np.ndarray(shape, dtype, memory, start).copy())
            elif start:
                array = np.ndarray(shape, dtype, memory, start, None, order)
                arrays.insert(index, array.copy(order))
        if kind == ERROR:
            text = arrays[0].tobytes().decode(errors="replace")
            raise PeerError(f"rank {comm.rank}: {method} failed because of rank {source}: {text}")
        if kind not in kinds:
            raise _wrong_kind(method, kind, kinds, envelope)
        if is_plain:
            return metadata, tuple(arrays), message_id
        (message,) = on_device([Message(kind, tuple(arrays), scalars, on_gpu)], comm.rank)
        return metadata, message.value(), message_id
    finally:
        observer.leave()


def wait_for_any_tag(
    method: str, envelope: Envelope, max_tag: int, observer: CallObserver
) -> Envelope:
    """Wait for the next message from a rank; return the rank with its tag, for :func:`recv`.

    Raises:
        TypeError: it has no user's tag, being part of another function; it isn't received.
    """
    comm, source, _ = envelope
    status = MPI.Status()
    observer.message(method, source, MPI.ANY_TAG)
    try:
        comm.Probe(source, MPI.ANY_TAG, status)
        if status.tag > max_tag:
            raise TypeError(
                f"rank {comm.rank}: {method} without a tag found a message that rank {source} "
                "sends as part of another function; give the tag with which the object is sent"
            )
    except BaseException:
        observer.leave()
        raise
    return comm, source, status.tag


def fits_inline(start: int, sizes: Sequence[int]) -> list[bool]:
    """Return for each array whether its data are in the first of MPI's messages.

    The arrays have ``sizes`` bytes each, and ``start`` bytes precede the first.
    """
    fit = []
    for size in sizes:
        fits = start + size <= INLINE_BYTES
        fit.append(fits)
        start += size * fits
    return fit


@lru_cache(maxsize=256)
def _encode(
    kind: str, specs: tuple[ArraySpec, ...], scalars: Any, on_gpu: Any, metadata: bytes
) -> tuple[bytes, tuple[bool, ...], bool, int]:
    """Return what follows from a message's metadata and the specs of its arrays.

    That is lengths, header and metadata in one; which arrays are out of line, empty if none is;
    whether all are C-contiguous; bytes of all.
    """
    header = messages.encode_header(kind, specs, scalars, on_gpu)
    head = _LENGTHS.pack(len(header), len(metadata)) + header + metadata
    sizes = [dtype.itemsize * math.prod(shape) for dtype, shape, _ in specs]
    fit = fits_inline(_MESSAGE_ID.size + len(head), sizes)
    out_of_line = () if all(fit) else tuple(map(not_, fit))
    return head, out_of_line, all([is_c for *_, is_c in specs]), sum(sizes)


class _Decoded(NamedTuple):
    """What follows from a message's header and metadata."""

    kind: str
    metadata: bytes
    # Each array's dtype, shape, order (None for C), and where its data begin in the first of MPI's
    # messages; 0 if they are out of line.
    places: list[tuple[np.dtype, tuple[int, ...], Any, int]]
    out_of_line: list[tuple[np.dtype, tuple[int, ...], Any]]  # dtype, shape, order
    scalars: tuple[int, ...]
    on_gpu: tuple[int, ...]
    is_plain: bool  # the message's value is the tuple of its arrays, as nearly always


def _decode(head: bytes, header_bytes: int) -> _Decoded:
    kind, specs, scalars, on_gpu = messages.decode_header(head[:header_bytes])
    start = _PREFIX_BYTES + len(head)
    fit = fits_inline(start, [size for *_, size in specs])
    places, out_of_line = [], []
    for (dtype, shape, order, size), fits in zip(specs, fit, strict=True):
        places.append((dtype, shape, None if order == "C" else order, start if fits else 0))
        if fits:
            start += size
        else:
            out_of_line.append((dtype, shape, order))
    is_plain = kind in (TUPLE, WITH_METADATA) and not scalars and not on_gpu
    return _Decoded(kind, head[header_bytes:], places, out_of_line, scalars, on_gpu, is_plain)


@lru_cache(maxsize=256)
def _decode_cached(head: bytes, header_bytes: int) -> _Decoded | None:
    """Return what :func:`_decode` does; None if it can't be cached."""
    if messages.decode_header_cached(head[:header_bytes]) is None:
        return None
    return _decode(head, header_bytes)


def _recv_arrays(
    specs: Sequence[tuple[np.dtype, tuple[int, ...], Any]], envelope: Envelope
) -> list[np.ndarray]:
    """Receive new arrays of these dtypes, shapes and orders.

    Where there is no memory for them, their data are discarded, so that the next message can be
    received.
    """
    comm, source, tag = envelope
    try:
        arrays = [messages.empty_array(*spec) for spec in specs]
    except MemoryError:
        for dtype, shape, _ in specs:
            discard(dtype.itemsize * math.prod(shape), comm, source, tag)
        raise
    for array in arrays:
        for piece in split_large(as_bytes(array)):
            comm.Recv([piece, MPI.BYTE], source, tag)
    return arrays


def _discard_out_of_line(head: bytes, header_bytes: int, end: int, envelope: Envelope) -> None:
    """Receive the arrays that are out of line, and keep none; nothing for half a header."""
    if len(head) >= header_bytes:
        sizes = messages.array_sizes(head[:header_bytes])
        for size, fits in zip(sizes, fits_inline(end, sizes), strict=True):
            if not fits:
                discard(size, *envelope)


def _wrong_kind(method: str, kind: str, kinds: tuple[str, ...], envelope: Envelope) -> TypeError:
    comm, source, _ = envelope
    if WITH_METADATA in kinds:
        method += "_with_metadata"
    what, suffix = {
        OBJECT: ("an object", "_obj"),
        WITH_METADATA: ("arrays with metadata (as of functions.send)", "_with_metadata"),
    }.get(kind, ("an array", ""))
    return TypeError(
        f"rank {comm.rank}: {method} got {what} that rank {source} sent with send{suffix} "
        f"(now discarded); receive it with recv{suffix}"
    )
