"""Sends and receives one message between two ranks.

The first of MPI's messages has a prefix, the metadata and the header, as much of these
as fits. If the arrays' data fit after them, they are there, too; most messages need no
other. Else the arrays follow out of line, where they aren't copied.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..numbers import as_bytes
from . import messages
from .handshake import Handshake
from .messages import OBJECT, WITH_METADATA, Message
from .process_group import InCall
from .transfer import MAX_MESSAGE_BYTES, split_large

# The size of the first of MPI's messages. Longer ones are faster out of line.
INLINE_BYTES = 64 << 10
# Lengths of metadata and header, which follow; whether data follow these.
_PREFIX = struct.Struct("<II?")
# What is sent by other methods than `send`, and how their names end.
_KINDS = {
    OBJECT: ("an object", "_obj"),
    WITH_METADATA: ("arrays with metadata (as of functions.send)", "_with_metadata"),
}


class Envelope(NamedTuple):
    """Between which ranks a message goes, and the handshake of their communicator."""

    comm: MPI.Intracomm
    other: int  # rank
    tag: int
    handshake: Handshake


def send(
    method: str,
    message: Message,
    envelope: Envelope,
    label: str = "",
    metadata: bytes = b"",
) -> None:
    """Send the message; return when its arrays may be changed.

    The handshake's observer gets ``method``, a communicator's, and ``label``, what the
    call is for.
    """
    comm, dest, tag, handshake = envelope
    nbytes = message.nbytes
    header = message.header()
    is_inline = _PREFIX.size + len(metadata) + len(header) + nbytes <= INLINE_BYTES
    prefix = _PREFIX.pack(len(metadata), len(header), is_inline)
    first = b"".join([prefix, metadata, header])
    buffers: list[np.ndarray] = []
    if is_inline:
        first += message.data()
    else:
        rest = np.frombuffer(first, np.uint8)[INLINE_BYTES:]
        buffers = [rest, *map(as_bytes, message.arrays)]
    with InCall(handshake, method):
        handshake.observer.message(method, dest, tag, nbytes, label)
        comm.Send([first[:INLINE_BYTES], MPI.BYTE], dest, tag)
        for buffer in buffers:
            for piece in split_large(buffer):
                comm.Send([piece, MPI.BYTE], dest, tag)


def recv(
    method: str,
    kinds: tuple[str, ...],
    envelope: Envelope,
    label: str = "",
    max_tag: int = 0,
) -> tuple[bytes, Any]:
    """Receive a message of :func:`send`: its metadata and value.

    If the tag is ``MPI.ANY_TAG``, it is the next message; one whose tag is greater than
    ``max_tag`` is part of another function, and stays where it is.

    TypeError is raised then, and if it is of none of these ``kinds``;
    CommunicationError if arrays can't be put on a GPU; and whatever hinders making one
    (no memory, a dtype's package). But for the first, the message is discarded.
    """
    comm, source, tag, handshake = envelope
    with InCall(handshake, method):
        handshake.observer.message(method, source, tag, 0, label)
        if tag == MPI.ANY_TAG:
            tag = _tag_of_next(method, envelope, max_tag)
            envelope = envelope._replace(tag=tag)
        metadata, message = _receive(envelope)
        if message.kind not in kinds:
            _, wanted = _named(kinds[0])
            found, way = _named(message.kind)
            raise TypeError(
                f"rank {comm.rank}: recv{wanted} got {found} that rank {source} sent with "
                f"send{way} (now discarded); receive it with recv{way}"
            )
        if message.on_gpu:
            (message,) = messages.on_device([message], comm.rank)
        return metadata, message.value()


def _named(kind: str) -> tuple[str, str]:
    """Return what a message of that kind is, and how the names of its methods end."""
    return _KINDS.get(kind, ("an array", ""))


def _tag_of_next(method: str, envelope: Envelope, max_tag: int) -> int:
    """Return the tag of the next message, which stays where it is."""
    comm, source, tag, _ = envelope
    status = MPI.Status()
    comm.Probe(source, tag, status)
    if status.tag > max_tag:
        raise TypeError(
            f"rank {comm.rank}: {method} without a tag found a message that rank {source} "
            "sends as part of another function; give the tag with which the object is sent"
        )
    return status.tag


def _receive(envelope: Envelope) -> tuple[bytes, Message]:
    """Receive a message whole, and its metadata; discard it if it can't be allocated."""
    first = np.empty(INLINE_BYTES, np.uint8)
    envelope.comm.Recv([first, MPI.BYTE], envelope.other, envelope.tag)
    metadata_bytes, header_bytes, is_inline = _PREFIX.unpack_from(first.data)
    start = _PREFIX.size + metadata_bytes
    end = start + header_bytes
    if end > INLINE_BYTES:
        first = np.concatenate((first, np.empty(end - INLINE_BYTES, np.uint8)))
        _recv_into(first[INLINE_BYTES:], envelope)
    metadata = first[_PREFIX.size : start].tobytes()
    header = first[start:end].tobytes()
    try:
        message = messages.allocate(header)
    except Exception:
        if not is_inline:
            for nbytes in messages.array_sizes(header):
                _discard(nbytes, envelope)
        raise
    if is_inline:
        message.fill(first.data[: end + message.nbytes])
    else:
        for array in message.arrays:
            _recv_into(as_bytes(array), envelope)
    return metadata, message


def _recv_into(buffer: np.ndarray, envelope: Envelope) -> None:
    for piece in split_large(buffer):
        envelope.comm.Recv([piece, MPI.BYTE], envelope.other, envelope.tag)


def _discard(nbytes: int, envelope: Envelope) -> None:
    """Receive as many bytes out of line, each piece over the one before."""
    scratch = np.empty(min(nbytes, MAX_MESSAGE_BYTES), np.uint8)
    for start in range(0, nbytes, MAX_MESSAGE_BYTES):
        _recv_into(scratch[: nbytes - start], envelope)
