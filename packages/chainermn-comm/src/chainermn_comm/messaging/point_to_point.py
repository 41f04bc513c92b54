"""Sends and receives one message between two ranks.

The first MPI message has a prefix, the metadata and the header. It also has small
arrays, so most messages need only one MPI message. Larger arrays follow in messages of
their own, without a copy.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..numbers import as_bytes
from . import messages
from .messages import OBJECT, WITH_METADATA, Message
from .process_group import InCall, ProcessGroup
from .transfer import split_large

# The maximum size of the first MPI message with data. Larger data are faster in messages of
# their own.
INLINE_BYTES = 64 << 10
# The lengths of the metadata and the header, which follow, and whether data follow them.
_PREFIX = struct.Struct("<II?")
# The kinds of messages of other methods than `send`: a description, and the end of the
# method's name.
_KINDS = {
    OBJECT: ("an object", "_obj"),
    WITH_METADATA: ("arrays with metadata (as of functions.send)", "_with_metadata"),
}


class Envelope(NamedTuple):
    """Between which ranks a message goes."""

    group: ProcessGroup
    other: int  # rank
    tag: int


def send(
    method: str,
    message: Message,
    envelope: Envelope,
    label: str = "",
    metadata: bytes = b"",
) -> None:
    """Send the message; return when its arrays may be changed.

    The handshake's observer gets ``method``, the name of the communicator's method, and
    ``label``, the purpose of the call.
    """
    group, dest, tag = envelope
    nbytes = message.nbytes
    header = message.header()
    is_inline = _PREFIX.size + len(metadata) + len(header) + nbytes <= INLINE_BYTES
    prefix = _PREFIX.pack(len(metadata), len(header), is_inline)
    first = b"".join([prefix, metadata, header])
    buffers: list[np.ndarray] = []
    if is_inline:
        first += message.data()
    else:
        buffers = list(map(as_bytes, message.arrays))
    with InCall(group.handshake, method):
        group.handshake.observer.message(method, dest, tag, nbytes, label)
        group.comm.Send([first, MPI.BYTE], dest, tag)
        for buffer in buffers:
            for piece in split_large(buffer):
                group.comm.Send([piece, MPI.BYTE], dest, tag)


def recv(
    method: str,
    kinds: tuple[str, ...],
    envelope: Envelope,
    label: str = "",
    max_tag: int = 0,
) -> tuple[bytes, Any]:
    """Receive a message of :func:`send`: its metadata and value.

    With ``MPI.ANY_TAG`` the next message is received. If its tag is greater than
    ``max_tag``, it belongs to another function: it is not received, and TypeError is
    raised. TypeError is also raised if the message is of none of these ``kinds``, and
    CommunicationError if arrays can't be put on a GPU; then the message is discarded. An
    error while arrays are allocated (no memory, a missing package for a dtype) ends the
    job.
    """
    group, source, tag = envelope
    rank = group.rank
    with InCall(group.handshake, method):
        group.handshake.observer.message(method, source, tag, 0, label)
        status = MPI.Status()
        group.comm.Probe(source, tag, status)
        if tag == MPI.ANY_TAG and status.tag > max_tag:
            raise TypeError(
                f"rank {rank}: {method} without a tag found a message that rank {source} "
                "sends as part of another function; give the tag with which the object is sent"
            )
        try:
            metadata, message = _receive(envelope, status)
        except BaseException as error:
            group.interrupt(method, error)
            raise
        if message.kind not in kinds:
            _, wanted = _named(kinds[0])
            found, way = _named(message.kind)
            raise TypeError(
                f"rank {rank}: recv{wanted} got {found} that rank {source} sent with "
                f"send{way} (now discarded); receive it with recv{way}"
            )
        if message.on_gpu:
            (message,) = messages.on_device([message], rank)
        return metadata, message.value()


def _named(kind: str) -> tuple[str, str]:
    """Return what a message of that kind is, and how the names of its methods end."""
    return _KINDS.get(kind, ("an array", ""))


def _receive(envelope: Envelope, status: MPI.Status) -> tuple[bytes, Message]:
    """Receive a message whose first part has this status; return its metadata, too."""
    group, source, _ = envelope
    tag = status.tag
    first = np.empty(status.count, np.uint8)
    group.comm.Recv([first, MPI.BYTE], source, tag)
    metadata_bytes, header_bytes, is_inline = _PREFIX.unpack_from(first.data)
    start = _PREFIX.size + metadata_bytes
    metadata = first[_PREFIX.size : start].tobytes()
    message = messages.allocate(first[start : start + header_bytes].tobytes())
    if is_inline:
        message.fill(first.data)
    else:
        for array in message.arrays:
            for piece in split_large(as_bytes(array)):
                group.comm.Recv([piece, MPI.BYTE], source, tag)
    return metadata, message
