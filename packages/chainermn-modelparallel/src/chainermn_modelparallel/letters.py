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
from typing import Any, NamedTuple

from chainermn_comm import CommunicatorBase
from chainermn_modelparallel.communication import FUNCTIONS

# What a letter's note begins with, so that no other is taken for one.
_MARK = b"letter"
# Mark, number, answers, graph, refusal, final, and how many bytes of wants come before positions.
_HEAD = struct.Struct("<6sqq?B?I")
# The greatest tag that every MPI has, less one.
GRADIENT_TAG = 32766
# Of a letter that nobody answers, and of data, that answer none.
UNNUMBERED = -1


class Letter(NamedTuple):
    """Arrays on their way.

    Attributes:
        number: the sender's own count, which an answer repeats.
        answers: number of the letter whose gradients these are; UNNUMBERED for data.
        wants: for each array, whether the sender's backward will wait for its gradient.
        positions: for each array, which of the answered letter's arrays it belongs to. Those
            that are left out have no gradient.
        arrays: any shape, memory order and dtype; the receiver owns fresh ones.
        graph: whether backward made a graph of these gradients, to be differentiated again.
        final: of such ones, whether that must not come by the rank that sent them, because it has
            no variable from which it could take part.
        refusal: if it brings no gradients because there will be none, why: an index to
            ``refusals.REASONS``; else 0.
    """

    number: int
    answers: int
    wants: tuple[bool, ...]
    positions: tuple[int, ...]
    arrays: tuple[Any, ...]
    graph: bool = False
    refusal: int = 0
    final: bool = False


def post(
    letter: Letter, communicator: CommunicatorBase, rank: int, tag: int, inside: str = "send"
) -> None:
    """Send a letter to ``rank``, which calls :func:`fetch` with the same tag.

    Reports of the watchdog say what the wait is ``inside`` of.
    """
    number, answers, wants, positions, arrays, graph, refusal, final = letter
    note = _HEAD.pack(_MARK, number, answers, graph, refusal, final, len(wants))
    note += _written(wants, positions)
    communicator.send_noted(note, arrays, rank, tag, FUNCTIONS + inside)


def fetch(communicator: CommunicatorBase, rank: int, tag: int, inside: str = "recv") -> Letter:
    """Wait for a letter of ``rank``.

    Raises:
        TypeError: it sent something else with this tag.
    """
    try:
        note, arrays = communicator.recv_noted(rank, tag, FUNCTIONS + inside)
    except TypeError as error:
        raise TypeError(
            f"{_expected(communicator, rank, tag)}, but {error}, or use different tags for "
            "different kinds of messages"
        ) from error
    if len(note) < _HEAD.size or not note.startswith(_MARK):
        raise TypeError(f"{_expected(communicator, rank, tag)}, got {note[:20]!r} (now discarded)")
    _, number, answers, graph, refusal, final, count = _HEAD.unpack_from(note)
    wants, positions = _read(note[_HEAD.size :], count)
    return Letter(number, answers, wants, positions, arrays, graph, refusal, final)


@lru_cache(maxsize=256)  # loops send the same few again and again
def _written(wants: tuple[bool, ...], positions: tuple[int, ...]) -> bytes:
    return bytes(wants) + struct.pack(f"<{len(positions)}I", *positions)


@lru_cache(maxsize=256)
def _read(written: bytes, count: int) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    places = struct.unpack(f"<{(len(written) - count) // 4}I", written[count:])
    return tuple(map(bool, written[:count])), places


def _expected(communicator: CommunicatorBase, rank: int, tag: int) -> str:
    return (
        f"rank {communicator.rank}: expected what rank {rank} sends with "
        f"chainermn.functions.send and tag {tag}"
    )


def check_peer(communicator: Any, rank: Any, tag: Any) -> tuple[int, int]:
    """The rank and the tag as plain integers.

    Raises:
        TypeError: an argument is of the wrong type; the text names this process's rank.
        ValueError: there is no such other rank, or no such tag.
    """
    if not isinstance(communicator, CommunicatorBase):
        raise TypeError(f"communicator must be a communicator, got {type(communicator).__name__}")
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
