"""Makes an error found on one rank an error of all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chainermn_comm import CommunicatorBase, PeerError, RankMismatchError
from chainermn_comm.errors import describe_exception


def gather_or_raise(
    communicator: CommunicatorBase, error: BaseException | None, value: Any = None
) -> list[Any]:
    """Collect every rank's value, unless one of them has an error (collective).

    Args:
        communicator: the ranks that agree.
        error: what went wrong on this rank; None if nothing did.
        value: any picklable object.

    Returns:
        Every rank's value, in rank order, on every rank.

    Raises:
        BaseException: ``error`` itself, on the rank that has one.
        PeerError: on the other ranks; it names the ranks that failed and says why.
    """
    text = None if error is None else _described(error, communicator.rank)
    with told_with(error):
        views = communicator.allgather_obj((text, None if error is not None else value))
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback leads back here, a cycle that would keep all its frames
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(views) if text is not None]
    if failures:
        raise PeerError(f"rank {communicator.rank} failed because of " + "; ".join(failures))
    return [value for _, value in views]


def call_or_raise(communicator: CommunicatorBase, action: Callable[[], Any]) -> list[Any]:
    """Call ``action``, and raise on every rank what it raises on one (collective).

    Returns:
        What it returned on every rank, in rank order, on every rank.

    Raises:
        BaseException: what ``action`` raises, on the rank where it does.
        PeerError: on the other ranks; it names the ranks that failed and says why.
    """
    error: BaseException | None = None
    value = None
    try:
        value = action()
    except BaseException as exception:  # the others would wait for who is interrupted, too
        error = exception
    try:
        return gather_or_raise(communicator, error, value)
    finally:
        del error  # its traceback leads back here


def bcast_or_raise(
    communicator: CommunicatorBase, error: BaseException | None, value: Any = None, root: int = 0
) -> Any:
    """Give ``root``'s value to every rank, unless it has an error (collective).

    Args:
        communicator: the ranks.
        error: what went wrong at ``root``; ignored elsewhere.
        value: any object, at ``root``; ignored elsewhere. One that can't be pickled is an error.
        root: the rank that has the value.

    Returns:
        ``value`` itself at ``root``, a copy of it on the other ranks.

    Raises:
        BaseException: ``error`` itself, at ``root``.
        PeerError: on the other ranks; it says what went wrong at ``root``.
    """
    here = communicator.rank == root
    text, content = None, b""
    if here and error is None:
        try:
            content = pickle.dumps(value, protocol=5)
        except BaseException as exception:
            error = exception
    if here and error is not None:
        text = _described(error, root)
    with told_with(error if here else None):
        text, content = communicator.bcast_obj((text, content), root=root)
    if here and error is not None:
        try:
            raise error
        finally:
            del error
    if text is not None:
        raise PeerError(f"rank {communicator.rank} failed because of rank {root}: {text}")
    return value if here else pickle.loads(content)


@contextmanager
def told_with(error: BaseException | None) -> Iterator[None]:
    """Let what fails in telling the others of ``error`` be printed with it, as its cause.

    An error found on one rank before a collective call leads that rank to the wrong one: it is
    all that explains the :class:`~chainermn_comm.errors.RankMismatchError` that follows.
    """
    try:
        yield
    except Exception as failure:
        if error is None or error is failure:
            raise
        raise failure from error


@contextmanager
def located(where: str) -> Iterator[None]:
    """Add to a mismatch of calls where this rank was, and what most often leads there."""
    try:
        yield
    except RankMismatchError as error:
        error.args = (
            f"{error}. This rank is in {where}. All ranks must update, evaluate and save equally "
            "often: where that goes by epochs, and a rank has more examples than another "
            "(scatter_dataset with force_equal_length=False) or smaller batches, count iterations",
        )
        raise


def _described(error: BaseException, rank: int) -> str:
    """The error in words, without the rank's number, which the peers put before it."""
    kind, colon, text = describe_exception(error).partition(": ")
    return kind + colon + text.removeprefix(f"rank {rank}: ")


def require_communicator(communicator: Any, caller: str) -> None:
    """Raise TypeError unless ``communicator`` is a ChainerMN communicator."""
    if not isinstance(communicator, CommunicatorBase):
        raise TypeError(
            f"{caller} needs a communicator made by create_communicator (or a subclass of "
            f"CommunicatorBase), not {type(communicator).__name__}"
        )
