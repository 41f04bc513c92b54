"""Letters: arrays that travel with a note of what they are and who waits for an answer.

Gradients travel back on a tag of their own, each with the number of the letter it answers.
So neither the order in which Chainer walks the graph on the two ranks nor the tags of the
letters can pair a gradient with the wrong send. Ranks that each send a large one first still wait
for each other, as MPI does.
"""

from __future__ import annotations

import operator
import struct
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from chainermn_comm import CommunicatorBase

from .ordered_function import FUNCTIONS

# What a letter's note begins with, so that no other is taken for one.
_MARK = b"letter"
# Mark, graph, refusal, final, own number, how many bytes of wants come before positions.
_HEAD = struct.Struct("<6s?B?qI")
# The greatest tag that every MPI has, less one.
GRADIENT_TAG = 32766
# Stands for an own number where there is none.
UNNUMBERED = -1
# How the calls are named in reports.
SEND, RECV = FUNCTIONS + "send", FUNCTIONS + "recv"


class Said(NamedTuple):
    """What a letter's note says.

    Attributes:
        wants: a byte for each array: 1 where the sender's backward will wait for its gradient.
        positions: for each array, which of the answered letter's arrays it belongs to, if some of
            these are left out because they have no gradient; else empty.
        graph: whether backward made a graph of these gradients, to be differentiated again.
        refusal: if it brings no gradients because there will be none, why: an index to
            ``refusals.REASONS``; else 0.
        final: of gradients with a graph, whether a second backward must not come by the rank that
            sent them, because it has no variable from which it could take part.
        own: number of an answer that may itself be answered; else UNNUMBERED.
    """

    wants: bytes
    positions: tuple[int, ...]
    graph: bool
    refusal: int
    final: bool
    own: int


# The number of the letter, or of the one that it answers; what it says; and its arrays, of any
# shape, memory order and dtype, of which the receiver owns fresh ones.
Letter: TypeAlias = tuple[int, Said, tuple[Any, ...]]


@lru_cache(maxsize=256)  # loops send the same few again and again
def note(
    wants: bytes,
    positions: tuple[int, ...] = (),
    graph: bool = False,
    refusal: int = 0,
    final: bool = False,
    own: int = UNNUMBERED,
) -> bytes:
    """The note that goes with arrays and a number by ``send_noted``; see :class:`Said`."""
    head = _HEAD.pack(_MARK, graph, refusal, final, own, len(wants))
    return head + wants + struct.pack(f"<{len(positions)}I", *positions)


@lru_cache(maxsize=256)
def _read(written: bytes) -> Said:
    if len(written) < _HEAD.size or not written.startswith(_MARK):
        raise TypeError(f"got {written[:20]!r} (now discarded)")
    _, graph, refusal, final, own, count = _HEAD.unpack_from(written)
    wants, places = written[_HEAD.size :][:count], written[_HEAD.size + count :]
    positions = struct.unpack(f"<{len(places) // 4}I", places)
    return Said(wants, positions, graph, refusal, final, own)


def fetch(communicator: CommunicatorBase, rank: int, tag: int, label: str = RECV) -> Letter:
    """Wait for a letter of ``rank``; reports of the watchdog name the call by the label.

    Raises:
        TypeError: it sent something else with this tag.
    """
    try:
        written, arrays, number = communicator.recv_noted(rank, tag, label)
    except TypeError as error:
        raise TypeError(
            f"{_expected(communicator, rank, tag)}, but {error}, or use different tags for "
            "different kinds of messages"
        ) from error
    try:
        return number, _read(written), arrays
    except TypeError as error:
        raise TypeError(f"{_expected(communicator, rank, tag)}, {error}") from None


def _expected(communicator: CommunicatorBase, rank: int, tag: int) -> str:
    return (
        f"rank {communicator.rank}: expected what rank {rank} sends with "
        f"chainermn.functions.send and tag {tag}"
    )


@lru_cache(maxsize=256)  # `isinstance` takes a tenth of all that a send does before it sends
def _is_communicator(kind: type) -> bool:
    return issubclass(kind, CommunicatorBase)


def check_peer(communicator: Any, rank: Any, tag: Any) -> tuple[int, int]:
    """The rank and the tag as plain integers.

    Raises:
        TypeError: an argument is of the wrong type; the text names this process's rank.
        ValueError: there is no such other rank, or no such tag.
    """
    kind: type = type(communicator)
    if not _is_communicator(kind):
        raise TypeError(f"communicator must be a communicator, got {kind.__name__}")
    mine, size = communicator.rank, communicator.size
    if type(rank) is not int or type(tag) is not int:
        rank, tag = as_integer("rank", rank, mine), as_integer("tag", tag, mine)
    if not 0 <= rank < size:
        raise ValueError(f"rank {mine}: there is no rank {rank}; ranks go from 0 to {size - 1}")
    if rank == mine:
        raise ValueError(
            f"rank {mine}: a rank can't send to itself or receive from itself; use the variable "
            "as it is"
        )
    if tag < 0 or tag == GRADIENT_TAG:
        raise ValueError(
            f"rank {mine}: tag must be 0 or more and not {GRADIENT_TAG}, which gradients take; "
            f"got {tag}"
        )
    return rank, tag


def as_integer(name: str, value: Any, mine: int) -> int:
    """The value as an int; TypeError, with this rank and the argument's name, if it is none.

    True and False are none: a ``force_tuple`` given as the tag would be waited for in vain.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"rank {mine}: {name} must be an integer, got {type(value).__name__}")
