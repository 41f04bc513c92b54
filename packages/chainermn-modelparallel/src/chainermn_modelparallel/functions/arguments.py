"""Checks of what users give; errors name this process's rank."""

from __future__ import annotations

from typing import Any

import chainer
from chainer import Variable

from chainermn_comm import CommunicatorBase
from chainermn_comm.numbers import as_integer

from .messages import Edge


def check_communicator(comm: Any, name: str = "comm") -> CommunicatorBase:
    """Return what is to communicate; raise TypeError unless it is a communicator (not collective).

    An object of any class is one if it wraps one, as by ``__getattr__``: its
    ``handshake`` is that of a communicator.
    """
    handshake = getattr(comm, "handshake", None)
    if not isinstance(getattr(handshake, "__self__", None), CommunicatorBase):
        raise TypeError(f"{name} must be a communicator, got {type(comm).__name__}")
    return comm  # type: ignore[no-any-return]


def check_edge(communicator: Any, rank: Any, tag: Any = 0) -> Edge:
    """Return the edge to another rank; raise unless there is such a rank, and such a tag."""
    check_communicator(communicator, "communicator")
    here = communicator.rank
    size = communicator.size
    rank = check_integer("rank", rank, here)
    tag = check_integer("tag", tag, here)
    if not 0 <= rank < size:
        raise ValueError(
            f"rank {here}: there is no rank {rank}; ranks go from 0 to {size - 1}"
        )
    if rank == here:
        raise ValueError(
            f"rank {here}: a rank can't send to itself or receive from itself; use the "
            "variable as it is"
        )
    if tag < 0 or tag == communicator.reserved_tag:
        raise ValueError(
            f"rank {here}: tag must be 0 or more and not {communicator.reserved_tag}, which "
            f"gradients take; got {tag}"
        )
    return Edge(communicator, rank, tag)


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
    """Return the argument as a variable; raise if it is neither variable nor array, or has none."""
    if not isinstance(x, (Variable, *chainer.get_array_types())):
        kind = type(x).__name__
        raise TypeError(
            f"rank {rank}: {name} must be a variable or an array, got {kind}"
        )
    variable = chainer.as_variable(x)
    if variable.array is None:
        raise ValueError(
            f"rank {rank}: {name} is a parameter that is not initialised yet "
            f"({variable.name or 'it has no name'})"
        )
    return variable
