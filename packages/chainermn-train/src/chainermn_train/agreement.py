"""Makes an error found on one rank an error of all of them."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase, PeerError
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
