"""Collective calls that raise on all ranks if one of them fails, and checks of arguments."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase, RankMismatchError
from chainermn_comm.errors import raise_together as raise_together
from chainermn_comm.numbers import as_integer

# Larger pickles travel separately, since a handshake is meant for some kilobytes.
_MAX_PAYLOAD_BYTES = 1 << 16
_CALL_REMEDIES = (
    "All ranks must update, evaluate and save equally often, several optimizers in the same "
    "order: where that goes by epochs, and a rank has more examples than another "
    "(scatter_dataset with force_equal_length=False) or smaller batches, count iterations. In "
    "a block of join() no loss can communicate, as ranks that have left compute none. If one "
    "rank alone has changed its model or loaded another state, synchronize() on all ranks"
)
_PARAMETER_REMEDIES = (
    "All ranks must have the same parameters: add and replace links alike on all ranks, then "
    "call setup(model) there. With zero_fill=False they must also compute the same gradients, "
    "and freeze the same parameters: else use zero_fill=True, which counts a missing gradient "
    "as zeros"
)


def allgather_checked(
    communicator: CommunicatorBase, operation: str, action: Callable[[], Any]
) -> list[Any]:
    """Return what ``action`` returns on every rank, in rank order (collective).

    A rank that fails, also in pickling its value, raises its own error. All others raise a
    PeerError, which names the failed ranks and their errors. If no rank has failed but
    some call another ``operation``, all raise RankMismatchError.
    """
    with raise_together(communicator.handshake, operation) as call:
        content = pickle.dumps(action(), protocol=5)
        if len(content) <= _MAX_PAYLOAD_BYTES:
            call.payload = content
    contents: Any = call.payloads
    if not all(contents):  # a pickle is never empty
        contents = communicator.allgather(np.frombuffer(content, np.uint8))
    return list(map(pickle.loads, contents))


def bcast_checked(
    communicator: CommunicatorBase,
    operation: str,
    make: Callable[[], Any],
    root: int = 0,
) -> Any:
    """Return on every rank a copy of what ``make`` returns at ``root``, or raise (collective)."""

    def make_at_root() -> Any:
        if communicator.rank == root:
            return make()
        return None

    return allgather_checked(communicator, operation, make_at_root)[root]


@contextmanager
def mismatch_hint(where: str) -> Iterator[None]:
    """Add this rank's place, and the most frequent remedies, to a RankMismatchError."""
    try:
        yield
    except RankMismatchError as error:
        remedies = _CALL_REMEDIES
        if error.entry == "parameter":
            remedies = _PARAMETER_REMEDIES
        error.args = (f"{error}. This rank is in {where}. {remedies}",)
        raise


def require_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return ``value`` as an int; raise TypeError or ValueError unless it is in this range."""
    number = as_integer(value)
    if number is None:
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}"
        if most is not None:
            bounds = f"from {least} to {most}"
        raise ValueError(f"{name} must be {bounds}, not {number}")
    return number


def require_communicator(communicator: Any, caller: str) -> CommunicatorBase:
    """Return ``communicator``; raise TypeError if it is no communicator."""
    if isinstance(communicator, CommunicatorBase):
        return communicator
    raise TypeError(
        f"{caller} needs a communicator made by create_communicator (or a subclass of "
        f"CommunicatorBase), not {type(communicator).__name__}"
    )
