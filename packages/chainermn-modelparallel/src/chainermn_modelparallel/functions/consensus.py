"""Lets ranks agree on one collective call of a function, before it moves any data.

Ranks that call different functions, or run backward through them in different orders, find out
here, and all of them raise; so does every rank when one of them can't take part.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from chainermn_comm import CommunicatorBase, PeerError, RankMismatchError

from .cancellation import refuse_dropped
from .ordered_function import FUNCTIONS, setting

# What must be equal on all ranks: names and how they stand here.
View = tuple[tuple[str, Any], ...]


class Form(NamedTuple):
    """Dtype and shape of an array in a view; the text is made only where it is shown."""

    dtype: Any
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


# Digest of the view, number of the call that backward belongs to, number of this call, flags.
_HEAD = struct.Struct("<16sqQB")
NO_CALL = -1
_PROBLEM, _WANTS, _BACKPROP = 1, 2, 4
ADVICE = (
    ". Call the same functions in the same order on all ranks; where backward comes to them in "
    "different orders, connect one's result to the next one's input with pseudo_connect"
)
_numbers = itertools.count()


class Call(NamedTuple):
    """What the ranks agreed on.

    Attributes:
        number: rank 0's count of calls, by which all ranks know this one again.
        wanted: whether some rank needs a gradient; backward is then collective.
        payloads: each rank's bytes, in rank order.
    """

    number: int
    wanted: bool
    payloads: list[bytes]


def agree(
    comm: CommunicatorBase,
    view: View,
    problem: BaseException | None = None,
    wants: bool = False,
    payload: bytes = b"",
    forward: int = NO_CALL,
) -> Call:
    """Agree on a call (collective: one ``allgather_bytes``).

    Args:
        comm: the ranks that agree.
        view: what must be equal on all ranks; the first entry names the operation.
        problem: why this rank can't take part.
        wants: whether this rank needs a gradient of the call.
        payload: bytes for the other ranks, of any length.
        forward: for backward, the number of the call whose gradients it takes back. It tells
            calls that are alike from each other, so that their gradients are not swapped.

    Raises:
        RankMismatchError: on all ranks, when views or those numbers differ, or when one needs a
            gradient and another runs in ``no_backprop_mode``.
        PeerError: on the ranks without a problem, when another has one; that one raises its
            problem itself.
    """
    refuse_dropped(comm)
    flags = _PROBLEM * (problem is not None) | _WANTS * wants
    flags |= _BACKPROP * bool(setting("enable_backprop"))
    digest, number = _digest(view), next(_numbers)
    head = _HEAD.pack(digest, forward, number, flags)
    try:
        rows = comm.allgather_bytes(head + payload, FUNCTIONS + view[0][1])
    except RankMismatchError as error:  # another rank's call is not even one of a function
        raise RankMismatchError(f"{error}{ADVICE}") from None
    payloads = [row[_HEAD.size :] for row in rows]
    if problem is None and all([row.startswith(head) for row in rows]):  # nearly always
        return Call(number, wants, payloads)
    heads = [_HEAD.unpack_from(row) for row in rows]
    if any(flags & _PROBLEM for *_, flags in heads):
        _raise_problem(comm, view, problem)
    if any(head[:2] != (digest, forward) for head in heads):
        _raise_mismatch(comm, view if forward == NO_CALL else (*view, ("call", forward)))
    wanted = any(flags & _WANTS for *_, flags in heads)
    without = [rank for rank, (*_, flags) in enumerate(heads) if not flags & _BACKPROP]
    if wanted and without:
        raise RankMismatchError(
            f"{view[0][1]} on rank {comm.rank}: some ranks need its gradients, but ranks {without} "
            "don't build a graph; use no_backprop_mode (and enable_double_backprop) on all ranks "
            "or on none"
        )
    return Call(heads[0][2], wanted, payloads)


@functools.lru_cache(maxsize=256)
def _digest(view: View) -> bytes:
    return hashlib.blake2b(repr(view).encode(), digest_size=16).digest()


def attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What ``make`` returns, or else what it raises, for the ranks to agree on."""
    try:
        return make(), None
    except BaseException as problem:  # Ctrl-C too: the other ranks are about to wait
        return None, problem


def require_communicator(comm: Any) -> None:
    """Raise TypeError unless ``comm`` is a communicator (without one no rank can be told)."""
    if not isinstance(comm, CommunicatorBase):
        raise TypeError(f"comm must be a communicator, got {type(comm).__name__}")


def check_root(comm: CommunicatorBase, root: Any) -> int:
    """The root as an int; ValueError unless it is one of the ranks."""
    if not isinstance(root, (int, np.integer)) or not 0 <= root < comm.size:
        raise ValueError(
            f"rank {comm.rank}: root must be an integer from 0 to {comm.size - 1}, got {root!r}"
        )
    return int(root)


def _raise_problem(comm: CommunicatorBase, view: View, problem: BaseException | None) -> None:
    own = f"rank {comm.rank}: "  # said below for each rank
    text = problem and f"{type(problem).__name__}: {str(problem).removeprefix(own)}"
    said = comm.allgather_obj(text)
    if problem is not None:
        raise problem
    failures = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
    raise PeerError(f"{view[0][1]} on rank {comm.rank} failed because of {failures}")


def _raise_mismatch(comm: CommunicatorBase, view: View) -> None:
    views = comm.allgather_obj(view)
    rows = itertools.zip_longest(*views)
    entries = next(row for row in rows if any(repr(entry) != repr(row[0]) for entry in row))
    name = next(entry[0] for entry in entries if entry)
    said = "; ".join(
        f"{entry[1] if entry else 'none'} on rank {rank}" for rank, entry in enumerate(entries)
    )
    advice = ADVICE if name in ("operation", "call") else ""
    raise RankMismatchError(
        f"{view[0][1]} on rank {comm.rank}: ranks disagree on the {name}: {said}{advice}"
    )
