"""Letters: arrays that travel with a note of what they are and who waits for an answer.

Gradients travel back on a tag of their own, each with the number of the letter it answers.
So neither the order in which Chainer walks the graph on the two ranks nor the tags of the
letters can pair a gradient with the wrong send. Ranks that each send a large one first still wait
for each other, as MPI does.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from chainermn_comm import CommunicatorBase
from chainermn_comm.watchdog import part_of
from chainermn_modelparallel.communication import FUNCTIONS

# What a letter's note begins with, so that other arrays are not taken for one.
_MARK = int.from_bytes(b"letter", "little")
# The greatest tag that every MPI has, less one.
GRADIENT_TAG = 32766
# Of a letter that nobody answers.
UNNUMBERED = -1


class Letter(NamedTuple):
    """Arrays on their way.

    Attributes:
        number: the sender's own count, which an answer repeats.
        answers: number of the letter whose gradients these are; None for data.
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
    answers: int | None
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

    The note goes before the arrays, as one more of them: two messages would cost twice. Reports
    of the watchdog say what the wait is ``inside`` of.
    """
    number, answers, wants, positions, arrays, graph, refusal, final = letter
    head = (_MARK, number, -1 if answers is None else answers, graph, refusal, final, len(wants))
    note = np.array(head + wants + positions, np.int64)
    with part_of(FUNCTIONS + inside):
        communicator.send((note, *arrays), rank, tag)


def fetch(communicator: CommunicatorBase, rank: int, tag: int, inside: str = "recv") -> Letter:
    """Wait for a letter of ``rank``.

    Raises:
        TypeError: it sent something else with this tag.
    """
    try:
        with part_of(FUNCTIONS + inside):
            found = communicator.recv(rank, tag)
    except TypeError as error:  # an object, says a communicator that can tell
        raise TypeError(f"{_expected(communicator, rank, tag)}, but {error}") from error
    note = found[0] if type(found) is tuple and found else None
    plain = type(note) is np.ndarray and note.dtype == np.int64 and note.ndim == 1
    numbers = note.tolist() if note is not None and plain else []
    if numbers[:1] != [_MARK]:
        raise TypeError(
            f"{_expected(communicator, rank, tag)}, got a {type(found).__name__} (now discarded); "
            "use different tags for different kinds of messages"
        )
    _, number, answers, graph, refusal, final, count, *rest = numbers
    wants = tuple([want == 1 for want in rest[:count]])
    return Letter(
        number,
        None if answers < 0 else answers,
        wants,
        tuple(rest[count:]),
        found[1:],
        graph == 1,
        refusal,
        final == 1,
    )


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
    """The value as an int; TypeError, with this rank and the argument's name, if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"rank {mine}: {name} must be an integer, got {kind}") from None
