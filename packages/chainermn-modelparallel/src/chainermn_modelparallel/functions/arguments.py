"""Checks of what users give; errors name this process's rank."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import chainer
from chainer import Variable

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_comm.numbers import as_integer

# Cached, since of an abstract class it is slow for what each send does before it sends.
_issubclass = lru_cache(maxsize=256)(issubclass)


def check_communicator(comm: Any, name: str = "comm") -> CommunicatorBase:
    """Return what is to communicate; raise TypeError unless it is a communicator (not collective).

    An object of any class is one if it wraps one, as by ``__getattr__``: its
    ``handshake`` is that of a communicator. For a double of one rank, such as a mock in
    a user's test, whose answers can't be relied on, it is a communicator of this
    process alone.
    """
    kind: type = type(comm)
    if _issubclass(kind, CommunicatorBase):
        return comm  # type: ignore[no-any-return]
    handshake = getattr(comm, "handshake", None)
    if isinstance(getattr(handshake, "__self__", None), CommunicatorBase):
        return comm  # type: ignore[no-any-return]
    place = (
        as_integer(getattr(comm, "rank", None)),
        as_integer(getattr(comm, "size", None)),
    )
    if place == (0, 1) and callable(getattr(comm, "bcast_data", None)):
        return _alone()
    raise TypeError(f"{name} must be a communicator, got {kind.__name__}")


@cache
def _alone() -> CommunicatorBase:
    from mpi4py import MPI  # which starts MPI

    return create_communicator("naive", MPI.COMM_SELF)


def check_peer(communicator: Any, rank: Any, tag: Any = 0) -> tuple[int, int]:
    """Return rank and tag as integers; raise unless there is such another rank, and such a tag."""
    check_communicator(communicator, "communicator")
    this_rank, size = communicator.rank, communicator.size
    if type(rank) is not int or type(tag) is not int:
        rank, tag = (
            check_integer("rank", rank, this_rank),
            check_integer("tag", tag, this_rank),
        )
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


def check_integer(name: str, value: Any, this_rank: int) -> int:
    """Return the value as an int; raise TypeError, naming rank and argument, if it is none.

    True and False are none: a ``force_tuple`` given as the tag would be waited for in
    vain.
    """
    number = as_integer(value)
    if number is None:
        raise TypeError(
            f"rank {this_rank}: {name} must be an integer, got {type(value).__name__}"
        )
    return number


def check_variable(name: str, x: Any, rank: int) -> Variable:
    """Return the argument as a variable; raise TypeError if it is neither variable nor array."""
    if not isinstance(x, (Variable, *chainer.get_array_types())):
        kind = type(x).__name__
        raise TypeError(
            f"rank {rank}: {name} must be a variable or an array, got {kind}"
        )
    return chainer.as_variable(x)
