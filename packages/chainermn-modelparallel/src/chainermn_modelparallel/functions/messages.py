"""Messages between `send` and `recv`: arrays, and a header that says who waits for gradients.

Gradients travel back on a tag of the library's own, each with the id of the message it answers.
So neither the order in which Chainer walks the graph on the two ranks nor the tags of the
messages can pair a gradient with the wrong send. Ranks that each send a large message first still
wait for each other, as MPI does.
"""

from __future__ import annotations

import operator
import struct
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np
from chainer import backend

from chainermn_comm import CommunicatorBase

from .ordered_function import SCOPE

# A header begins with it, so that no other metadata is taken for one.
_MAGIC = b"CMNMSG"
# Magic, differentiable, cancellation, not_twice_differentiable, reply_id, bytes of the mask.
_FIXED = struct.Struct("<6s?B?qI")
# Stands for an id where there is none.
NO_REPLY = -1
# How the calls are named in reports.
SEND, RECV = SCOPE + "send", SCOPE + "recv"


class Header(NamedTuple):
    """What the metadata of a message say.

    Attributes:
        requires_grad_mask: a byte for each array: 1 where the sender's backward will wait for its
            gradient.
        positions: for each array, which of the answered message's arrays it belongs to, if some of
            these are left out because they have no gradient; else empty.
        differentiable: whether backward made a graph of these gradients.
        cancellation: if there will be no gradients, why: a key of ``cancellation.REASONS``; else 0.
        not_twice_differentiable: of differentiable gradients, whether a second backward must not
            reach the rank that sent them, because it has no variable from which it could take part.
        reply_id: id by which these gradients may themselves be answered; else NO_REPLY.
    """

    requires_grad_mask: bytes
    positions: tuple[int, ...] = ()
    differentiable: bool = False
    cancellation: int = 0
    not_twice_differentiable: bool = False
    reply_id: int = NO_REPLY


# Loops send the same few again and again.
make_header = lru_cache(maxsize=256)(Header)


# What is received: the message's id, or that of the message that it answers; its header; and new
# arrays of any shape, memory order and dtype.
Message: TypeAlias = tuple[int, Header, tuple[Any, ...]]


@lru_cache(maxsize=256)
def _encode_header(header: Header) -> bytes:
    mask, positions, *flags, reply_id = header
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
    header: Header,
    arrays: tuple[Any, ...],
    communicator: CommunicatorBase,
    rank: int,
    tag: int,
    message_id: int,
    label: str = SEND,
) -> None:
    """Send a message to ``rank``; reports of the watchdog name the call by the label."""
    metadata = _encode_header(header)
    if not arrays or type(arrays[0]) is np.ndarray:  # then all are
        communicator.send_with_metadata(metadata, arrays, rank, tag, label, message_id)
    else:
        with chainer.using_device(backend.get_device_from_array(*arrays)):
            communicator.send_with_metadata(metadata, arrays, rank, tag, label, message_id)


def receive_message(
    communicator: CommunicatorBase, rank: int, tag: int, label: str = RECV
) -> Message:
    """Wait for a message of ``rank``; reports of the watchdog name the call by the label.

    Raises:
        TypeError: it sent something else with this tag.
    """
    try:
        metadata, arrays, message_id = communicator.recv_with_metadata(rank, tag, label)
        return message_id, _decode_header(metadata), arrays
    except TypeError as error:
        raise TypeError(
            f"rank {communicator.rank}: expected what rank {rank} sends with "
            f"chainermn.functions.send and tag {tag}, but {error}, or use different tags for "
            "different kinds of messages"
        ) from error


@lru_cache(maxsize=256)  # `isinstance` takes a tenth of all that a send does before it sends
def _is_communicator(kind: type) -> bool:
    return issubclass(kind, CommunicatorBase)


def check_peer(communicator: Any, rank: Any, tag: Any = 0) -> tuple[int, int]:
    """Return the rank and the tag as plain integers.

    Raises:
        TypeError: an argument is of the wrong type; the text names this process's rank.
        ValueError: there is no such other rank, or no such tag.
    """
    kind: type = type(communicator)
    if not _is_communicator(kind):
        raise TypeError(f"communicator must be a communicator, got {kind.__name__}")
    this_rank, size = communicator.rank, communicator.size
    if type(rank) is not int or type(tag) is not int:
        rank, tag = as_integer("rank", rank, this_rank), as_integer("tag", tag, this_rank)
    if not 0 <= rank < size:
        raise ValueError(
            f"rank {this_rank}: there is no rank {rank}; ranks go from 0 to {size - 1}"
        )
    if rank == this_rank:
        raise ValueError(
            f"rank {this_rank}: a rank can't send to itself or receive from itself; use the "
            "variable as it is"
        )
    if tag < 0 or tag == communicator.reserved_tag:
        raise ValueError(
            f"rank {this_rank}: tag must be 0 or more and not {communicator.reserved_tag}, which "
            f"gradients take; got {tag}"
        )
    return rank, tag


def as_integer(name: str, value: Any, this_rank: int) -> int:
    """Return the value as an int; raise TypeError, naming rank and argument, if it is none.

    True and False are none: a ``force_tuple`` given as the tag would be waited for in vain.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"rank {this_rank}: {name} must be an integer, got {type(value).__name__}")
