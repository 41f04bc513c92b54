"""Messages between `send` and `recv`: arrays, and a header that says who waits for gradients.

Gradients travel back on a tag of the library's own, each with the id of the message it
answers. So neither the order in which Chainer walks the graph on the two ranks nor the
tags of the messages can pair a gradient with the wrong send. Ranks that each send a
large message first still wait for each other, as MPI does.
"""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

from chainermn_comm import CommunicatorBase

from .control_dependencies import Arrays
from .ordered_function import SCOPE

# Each header begins with these bytes, so that other metadata aren't mistaken for a header.
_MAGIC = b"CMNMSG"
# The magic bytes and all fields of `Header` except the mask, which follows.
_FIXED = struct.Struct("<6sqqB??")
# The ids of the messages that this process sends.
message_ids = itertools.count(1)


class Edge(NamedTuple):
    """One end of an edge of the graph."""

    communicator: CommunicatorBase
    peer: int  # the other rank
    tag: int


class Header(NamedTuple):
    """The metadata of a message."""

    message_id: int

    # Only messages of gradients, and cancellations, set the next four fields.
    # The id of the message whose gradients these are.
    answered_id: int = 0
    # The reason why no gradients come, a key of `cancellation.REASONS`; 0 if they come.
    cancellation: int = 0
    # Whether backward built a graph of the gradients.
    differentiable: bool = False
    # Whether the sender of the gradients can't take part in a second backward, because it
    # has no variable from which to start one.
    not_twice_differentiable: bool = False

    # A byte for each array: 1 if the sender's backward will wait for the array's gradient.
    requires_grad_mask: bytes = b""

    @property
    def needed(self) -> list[int]:
        """The indexes of the arrays whose gradients the sender's backward will wait for."""
        return [index for index, bit in enumerate(self.requires_grad_mask) if bit]


class Message(NamedTuple):
    """A received message; its arrays are new, of any shape, memory order and dtype."""

    header: Header
    arrays: Arrays


def send_message(
    header: Header, arrays: Arrays, edge: Edge, label: str = SCOPE + "send"
) -> None:
    """Send arrays to the other rank; ``label`` names the call in the watchdog's reports."""
    *fields, mask = header
    metadata = _FIXED.pack(_MAGIC, *fields) + mask
    edge.communicator.send_with_metadata(metadata, arrays, edge.peer, edge.tag, label)


def receive_message(edge: Edge, label: str = SCOPE + "recv") -> Message:
    """Wait for a message of the other rank; ``label`` names the call in the watchdog's reports."""
    communicator, peer, tag = edge
    try:
        metadata, arrays = communicator.recv_with_metadata(peer, tag, label)
        if len(metadata) < _FIXED.size or not metadata.startswith(_MAGIC):
            raise TypeError(
                f"got metadata {metadata[:20]!r} (now discarded); receive it with "
                "recv_with_metadata"
            )
    except TypeError as error:
        raise TypeError(
            f"rank {communicator.rank}: expected what rank {peer} sends with "
            f"chainermn.functions.send and tag {tag}, but {error}, or use different tags for "
            "different kinds of messages"
        ) from error
    _, *fields = _FIXED.unpack_from(metadata)
    header = Header._make([*fields, metadata[_FIXED.size :]])
    return Message(header, arrays)
