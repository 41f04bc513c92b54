"""`MultiNodeChainList`: a model whose components lie on several ranks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import chainer
from chainer import Variable

from chainermn_comm import CommunicatorBase, Sharding
from chainermn_comm.numbers import integer_between, wrong_kind

from ..functions import (
    check_communicator,
    pseudo_connect,
    recv_variables,
    send_variables,
)
from ..loss_scaling import refuse_unshared_scale
from .shardings import ShardedLink

# The ranks to which a component sends, or from which it receives, in order. None stands
# for the arguments, or for the output, of the model.
Ranks = tuple[int, ...] | None


class _Route(NamedTuple):
    """Where a component's arguments come from, and where its result goes."""

    rank_in: Ranks
    rank_out: Ranks


class MultiNodeChainList(ShardedLink, chainer.ChainList):
    """This rank's components of a model that spans ranks.

    Each rank makes a list, adds its components with :meth:`add_link` and calls it; a
    component's result goes to other ranks' components. Components run in the order in
    which they were added, and backward visits them the other way round, on each rank,
    so backward meets no deadlock that forward did not.

    Calling it runs forward. Its arguments go to each component with ``rank_in=None``;
    it returns the result of the component with ``rank_out=None``, of whatever type;
    backward through the variables in it, also within tuples, lists and dicts, goes on
    to the other ranks. A rank without such a component gets a delegate variable without
    data (float32 of shape ``(0,)``); call its ``backward``, which takes part in the
    other ranks' backward. Gradients can't be differentiated again by way of a rank
    whose first component begins with what it receives. That rank has no variable of its
    own from which it could take part in a second backward, so the second backward
    raises RankMismatchError on the rank that sent. Write such a model with :func:`recv`
    and its ``delegate_variable``.

    The list holds only this rank's parameters: optimizers, serializers and
    ``to_device`` work as with any :class:`chainer.ChainList`. A copy, deep or not, has
    the same communicator.

    Hooks of Chainer's optimizers see only this rank's parameters, too. Under an
    optimizer of Chainer, ``GradientClipping`` scales each rank's gradients by the norm
    of that rank's part, unlike one process, and nothing reports it. Add
    ``chainermn.MultiNodeGradientClipping`` instead, whose norm is that of the whole
    model.

    Making one is not collective.

    Args:
        comm: the communicator of all ranks that hold components.

    Raises:
        TypeError: ``comm`` is no communicator.
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        check_communicator(comm)
        super().__init__()
        self._comm = comm
        self._routes: list[_Route] = []

    def add_link(
        self,
        link: chainer.Link,
        rank_in: int | Iterable[int] | None = None,
        rank_out: int | Iterable[int] | None = None,
    ) -> None:
        """Add a component.

        Args:
            link: the component. With ``rank_in`` it is called with one argument for
                each rank that it receives from: a variable, or a tuple if the sender's
                returned several.
            rank_in: the rank, or an iterable of ranks, from which it receives, in this
                order; None for the arguments of the model.
            rank_out: the rank, or an iterable of ranks, to which its result is sent;
                None to make the result the model's output. Only one component can give
                the model's output. A rank may send to a later component of its own.

        Raises:
            TypeError: ``link`` is no link.
            ValueError: there is no such rank, a list of ranks is empty, or another
                component gives the model's output already.
        """
        here = self._comm.rank
        if not isinstance(link, chainer.Link):
            raise wrong_kind("a component must be a chainer.Link", link, here)
        route = _Route(
            self._check_ranks("rank_in", rank_in),
            self._check_ranks("rank_out", rank_out),
        )
        if route.rank_out is None and any(r.rank_out is None for r in self._routes):
            raise ValueError(
                f"rank {here}: another component has rank_out=None already, and a model has one "
                "output; let one component return a tuple"
            )
        super().add_link(link)
        # A new list: a copy of the model has the old one.
        self._routes = [*self._routes, route]

    def _check_ranks(self, name: str, ranks: Any) -> Ranks:
        if ranks is None:
            return None
        what = f"rank {self._comm.rank}: {name}"
        last = self._comm.size - 1
        several = ranks if isinstance(ranks, Iterable) else (ranks,)
        numbers = tuple(integer_between(rank, 0, last, what) for rank in several)
        if not numbers:
            raise ValueError(f"{what} must not be empty; None means none")
        return numbers

    def _sharding(self, param: Any) -> Sharding:
        return Sharding("placed", self._comm)

    def forward(self, *inputs: Any) -> Any:
        """Run this rank's components, see the class (collective over ranks with components).

        Raises:
            TypeError: a component with a ``rank_out`` returned something else than a
                variable, an array, or a tuple or list of them. A component without a
                ``return`` returned None.
            ValueError: there is no component, or a component sends to this rank or
                receives from it, and no other component of this rank is the other end.
            RuntimeError: the call is part of the ``update`` of an optimizer that adapts
                a loss scale for this rank alone; see :func:`share_loss_scale`.
        """
        here = self._comm.rank
        refuse_unshared_scale(here)
        if not self._routes or len(self._routes) != len(self):
            raise ValueError(
                f"rank {here}: add each component with add_link, and at least one"
            )
        outputs = []
        messages = _Messages(self._comm)
        for link, route in zip(self, self._routes, strict=True):
            arguments = inputs
            if route.rank_in is not None:
                arguments = tuple([messages.receive(rank) for rank in route.rank_in])
            returned = link(*arguments)
            if route.rank_out is None:
                outputs.append(returned)
                continue
            for rank in route.rank_out:
                messages.send(returned, rank)
        if messages.local:
            raise ValueError(
                f"rank {here}: a component sends to its own rank {here}, and no later one has "
                f"rank_in={here}"
            )
        if outputs:  # at most one component gives the output
            return _connect_variables(messages.delegate, outputs[0])
        return messages.delegate


class _Messages:
    """The messages that this rank's components exchange in one forward."""

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        # This variable depends on all messages that were sent and received so far.
        self.delegate: Variable | None = None
        # The results that are for later components of this rank.
        self.local: deque[Any] = deque()
        self._sent_first = False  # whether this rank sent before it received

    def receive(self, rank: int) -> Any:
        """Return the variable, or a tuple of them, that a component gets from a rank."""
        here = self._comm.rank
        if rank == here:
            if not self.local:
                raise ValueError(
                    f"rank {here}: a component receives from its own rank {here}, and "
                    f"no earlier one has rank_out={here} for it"
                )
            return self.local.popleft()
        variables, node = recv_variables(self._comm, rank, self.delegate)
        if node is not None:
            node.not_twice_differentiable |= not self._sent_first
            self.delegate = node.delegate_output()
        if len(variables) == 1:
            return variables[0]
        return variables

    def send(self, returned: Any, rank: int) -> None:
        """Give a component's result to a rank."""
        if rank == self._comm.rank:
            self.local.append(returned)
            return
        self._sent_first |= self.delegate is None
        self.delegate = send_variables(
            returned, self._comm, rank, delegate=self.delegate
        )


def _connect_variables(delegate: Variable | None, outputs: Any) -> Any:
    """Return the model's output, with a control dependency on the delegate in its variables."""
    if delegate is None or not delegate.requires_grad:
        return outputs
    if isinstance(outputs, Variable):
        return pseudo_connect(delegate, outputs)
    if isinstance(outputs, dict):
        connected = copy.copy(outputs)
        for key, x in outputs.items():
            connected[key] = _connect_variables(delegate, x)
        return connected
    if isinstance(outputs, (tuple, list)):
        items = [_connect_variables(delegate, x) for x in outputs]
        make = getattr(outputs, "_make", type(outputs))  # of a named tuple
        return make(items)
    return outputs
