"""Messages between `send` and `recv`: arrays, and a header that says who waits for gradients.

Gradients travel back on a tag of the library's own, each with the id of the message it
answers. So neither the order in which Chainer walks the graph on the two ranks nor the
tags of the messages can pair a gradient with the wrong send. Ranks that each send a
large message first still wait for each other, as MPI does.
"""

from __future__ import annotations

import itertools
import struct
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np
from chainer import backend

from chainermn_comm import CommunicatorBase

from .ordered_function import SCOPE, Arrays

# A header begins with it, so that no other metadata is taken for one.
_MAGIC = b"CMNMSG"
# Magic, differentiable, cancellation, not_twice_differentiable, reply_id, bytes of the
# mask.
_FIXED = struct.Struct("<6s?B?qI")
_ID = struct.Struct("<q")  # of the message, which follows its header
# Stands for an id where there is none.
NO_REPLY = -1
# One end of an edge of the graph: the communicator, the other rank, the tag.
Edge: TypeAlias = tuple[CommunicatorBase, int, int]
# Messages of this process are numbered.
message_ids = itertools.count()


class Header(NamedTuple):
    """What the metadata of a message say; all but the first field is of gradients."""

    # A byte for each array: 1 where the sender's backward will wait for its gradient.
    requires_grad_mask: bytes
    # For each array, which of the answered message's it belongs to; empty if to all in
    # turn.
    positions: tuple[int, ...] = ()
    # Whether backward made a graph of them.
    differentiable: bool = False
    # If there will be none, why: a key of `cancellation.REASONS`.
    cancellation: int = 0
    # Whether a second backward must not reach their sender, which has no variable to
    # start from.
    not_twice_differentiable: bool = False
    # By which they may themselves be answered.
    reply_id: int = NO_REPLY


# What is received: the message's id, or that of the message that it answers; its
# header; and new arrays of any shape, memory order and dtype.
Message: TypeAlias = tuple[int, Header, Arrays]


@lru_cache(maxsize=256)  # loops send the same few again and again
def encode_header(*fields: Any, **named: Any) -> bytes:
    """Return the metadata that say what a :class:`Header` of these fields does."""
    mask, positions, *flags, reply_id = Header(*fields, **named)
    fixed = _FIXED.pack(_MAGIC, *flags, reply_id, len(mask))
    return fixed + mask + struct.pack(f"<{len(positions)}I", *positions)


@lru_cache(maxsize=256)
def _decode_header(metadata: bytes) -> Header:
    if len(metadata) < _FIXED.size or not metadata.startswith(_MAGIC):
        raise TypeError(
            f"got metadata {metadata[:20]!r} (now discarded); receive it with recv_with_metadata"
        )
    _, graph, cancellation, last, reply_id, count = _FIXED.unpack_from(metadata)
    mask, rest = metadata[_FIXED.size :][:count], metadata[_FIXED.size + count :]
    positions = struct.unpack(f"<{len(rest) // 4}I", rest)
    return Header(mask, positions, graph, cancellation, last, reply_id)


def send_message(
    metadata: bytes,
    arrays: Arrays,
    edge: Edge,
    message_id: int,
    label: str = SCOPE + "send",
) -> None:
    """Send a message to the other rank; reports of the watchdog name the call by the label.

    The metadata are of :func:`encode_header`.
    """
    communicator, rank, tag = edge
    metadata += _ID.pack(message_id)
    if not arrays or type(arrays[0]) is np.ndarray:  # then all are
        communicator.send_with_metadata(metadata, arrays, rank, tag, label)
    else:
        with chainer.using_device(backend.get_device_from_array(*arrays)):
            communicator.send_with_metadata(metadata, arrays, rank, tag, label)


def receive_message(edge: Edge, label: str = SCOPE + "recv") -> Message:
    """Wait for a message of the other rank; reports of the watchdog name the call by the label."""
    communicator, rank, tag = edge
    try:
        metadata, arrays = communicator.recv_with_metadata(rank, tag, label)
        header = _decode_header(metadata[: -_ID.size])
        return *_ID.unpack(metadata[-_ID.size :]), header, arrays
    except TypeError as error:
        raise TypeError(
            f"rank {communicator.rank}: expected what rank {rank} sends with "
            f"chainermn.functions.send and tag {tag}, but {error}, or use different tags for "
            "different kinds of messages"
        ) from error
