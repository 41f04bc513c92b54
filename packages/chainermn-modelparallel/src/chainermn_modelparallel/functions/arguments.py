"""Checks of users' arguments; errors name this process's rank."""

from __future__ import annotations

from typing import Any

import chainer
from chainer import Variable

from chainermn_comm import CommunicatorBase
from chainermn_comm.numbers import integer_between, wrong_kind

from .messages import Edge


def check_communicator(comm: Any, name: str = "comm") -> CommunicatorBase:
    """Return the communicator; raise TypeError if the argument isn't one (not collective).

    An object that wraps a communicator, for example by ``__getattr__``, counts as a
    communicator: its ``handshake`` is a communicator's method.
    """
    handshake = getattr(comm, "handshake", None)
    if not isinstance(getattr(handshake, "__self__", None), CommunicatorBase):
        raise TypeError(f"{name} must be a communicator, got {type(comm).__name__}")
    return comm  # type: ignore[no-any-return]


def check_edge(communicator: Any, rank: Any, tag: Any = 0) -> Edge:
    """Return the edge to another rank; raise if the rank or the tag doesn't exist."""
    check_communicator(communicator, "communicator")
    who = f"rank {communicator.rank}:"
    peer = integer_between(rank, 0, communicator.size - 1, f"{who} rank")
    if peer == communicator.rank:
        raise ValueError(
            f"{who} a rank can't send to itself or receive from itself; use the variable as it is"
        )
    # Gradients take the reserved tag.
    most = communicator.reserved_tag - 1
    return Edge(communicator, peer, integer_between(tag, 0, most, f"{who} tag"))


def check_variable(name: str, x: Any, rank: int) -> Variable:
    """Return a variable or array as a variable; raise for other types or without values."""
    if not isinstance(x, (Variable, *chainer.get_array_types())):
        raise wrong_kind(f"{name} must be a variable or an array", x, rank)
    variable = chainer.as_variable(x)
    if variable.array is None:
        raise ValueError(
            f"rank {rank}: {name} is a parameter that is not initialised yet "
            f"({variable.name or 'it has no name'})"
        )
    return variable
