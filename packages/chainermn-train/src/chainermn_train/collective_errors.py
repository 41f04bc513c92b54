"""Collective calls that raise on all ranks what fails on one of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase, RankMismatchError
from chainermn_comm.errors import capture_error as capture_error

# Larger pickles travel separately: a handshake is made for some kilobytes.
_MAX_PAYLOAD_BYTES = 1 << 16


def allgather_checked(
    communicator: CommunicatorBase,
    operation: str,
    value: Any = None,
    *,
    error: BaseException | None = None,
) -> list[Any]:
    """Collect every rank's value, unless one of them has an error (collective).

    Args:
        communicator: the ranks.
        operation: what the values are collected for, as errors name it; the same on all ranks.
        value: any picklable object; one that can't be pickled is an error of this rank.
        error: why this rank has no value; None if nothing is wrong.

    Returns:
        Every rank's value, in rank order, on every rank.

    Raises:
        BaseException: ``error`` itself, on the rank that has one.
        PeerError: on the other ranks; it names the ranks that failed and says why.
        RankMismatchError: on all ranks, if some call something else and none has an error.
    """
    content = b""
    try:
        if error is None:
            content, error = capture_error(lambda: pickle.dumps(value, protocol=5))
        small = error is None and len(content) <= _MAX_PAYLOAD_BYTES
        payload = content if small else b""  # a pickle is never empty
        payloads = communicator.handshake(operation, error=error, payload=payload)
    finally:
        del error  # its traceback refers to this frame: a cycle would keep all its frames alive
    if all(payloads):
        return [pickle.loads(each) for each in payloads]
    arrays = communicator.allgather(np.frombuffer(content, np.uint8))
    return [pickle.loads(each.data) for each in arrays]


def run_on_all_ranks(
    communicator: CommunicatorBase, operation: str, action: Callable[[], Any]
) -> list[Any]:
    """Call ``action``, and raise on every rank what it raises on one (collective).

    Args:
        communicator: the ranks.
        operation: what ``action`` is part of, as errors name it; the same on all ranks.
        action: what each rank does; it returns any picklable object.

    Returns:
        What it returned on every rank, in rank order, on every rank.

    Raises:
        BaseException: what ``action`` raises, on the rank where it does.
        PeerError: on the other ranks; it names the ranks that failed and says why.
    """
    value, error = capture_error(action)
    try:
        return allgather_checked(communicator, operation, value, error=error)
    finally:
        del error


def bcast_checked(
    communicator: CommunicatorBase, operation: str, make: Callable[[], Any], root: int = 0
) -> Any:
    """Call ``make`` at ``root`` and give every rank what it returns (collective).

    Args:
        communicator: the ranks.
        operation: what the value is needed for, as errors name it; the same on all ranks.
        make: called at ``root`` only; it returns any picklable object.
        root: the rank that has the value.

    Returns:
        The value itself at ``root``, a copy of it on the other ranks.

    Raises:
        BaseException: what ``make`` or pickling raises, at ``root``.
        PeerError: on the other ranks; it says what failed at ``root``.
    """
    value: Any = None
    error: BaseException | None = None
    if communicator.rank == root:
        value, error = capture_error(make)
    try:
        received = allgather_checked(communicator, operation, value, error=error)[root]
    finally:
        del error
    return value if communicator.rank == root else received


def require_same(
    communicator: CommunicatorBase, operation: str, entries: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Call ``entries``, and raise on every rank unless it returns the same on all (collective).

    Args:
        communicator: the ranks.
        operation: what needs them to be the same, as errors name it; the same on all ranks.
        entries: returns hashable values by their names, whose ``repr`` tells them apart.

    Returns:
        The entries.

    Raises:
        BaseException: what ``entries`` raises, on the rank where it does.
        PeerError: on the other ranks; it names the ranks that failed and says why.
        RankMismatchError: on all ranks; it names the first entry that differs, and says how.
    """
    found: dict[str, Any] | None
    found, error = capture_error(entries)
    found = found or {}
    try:
        communicator.handshake(operation, found.items(), error=error)
    finally:
        del error
    return found


@contextmanager
def chain_cause(error: BaseException | None) -> Iterator[None]:
    """Make ``error`` the cause of another exception that is raised within.

    An error that one rank meets before a collective call can lead that rank to the wrong call.
    It is then all that explains the :class:`~chainermn_comm.errors.RankMismatchError`.
    """
    try:
        yield
    except Exception as failure:
        if error is None or error is failure:
            raise
        raise failure from error


@contextmanager
def add_mismatch_hint(where: str) -> Iterator[None]:
    """Add to a RankMismatchError where this rank was, and the most frequent reason for it."""
    try:
        yield
    except RankMismatchError as error:
        error.args = (
            f"{error}. This rank is in {where}. All ranks must update, evaluate and save equally "
            "often: where that goes by epochs, and a rank has more examples than another "
            "(scatter_dataset with force_equal_length=False) or smaller batches, count iterations",
        )
        raise


def require_communicator(communicator: Any, caller: str) -> None:
    """Raise TypeError unless ``communicator`` is a ChainerMN communicator."""
    if not isinstance(communicator, CommunicatorBase):
        raise TypeError(
            f"{caller} needs a communicator made by create_communicator (or a subclass of "
            f"CommunicatorBase), not {type(communicator).__name__}"
        )
