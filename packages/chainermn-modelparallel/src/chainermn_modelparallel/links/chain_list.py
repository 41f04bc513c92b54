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
    """This rank's components of a model that spans several ranks.

    Each rank makes a list (not collective), adds its components by :meth:`add_link`,
    and calls the list. A component's result goes to components of other ranks. On each
    rank, components run in the order in which they were added, and backward visits them
    in the reverse order. So backward can't deadlock if forward didn't.

    A call runs forward. Its arguments go to each component with ``rank_in=None``. The
    call returns the result of the component with ``rank_out=None``, of any type.
    Backward through the variables in it, also inside tuples, lists and dicts, continues
    on the other ranks. A rank without such a component gets a delegate variable without
    data (float32 of shape ``(0,)``); it must call this variable's ``backward``.

    Gradients can't be differentiated again through a rank whose first component
    receives its input from another rank, because no variable of this rank could start a
    second backward. The second backward then raises RankMismatchError on the sender.
    Write such a model with :func:`recv` and its ``delegate_variable``.

    The list holds only this rank's parameters. Optimizers, serializers and
    ``to_device`` work as with any :class:`chainer.ChainList`. A copy, shallow or deep,
    has the same communicator.

    Hooks of an optimizer see only this rank's parameters, too. With an optimizer of
    Chainer, ``GradientClipping`` would scale each rank's gradients by the norm of that
    rank's part, and nothing reports this. Use ``chainermn.MultiNodeGradientClipping``,
    which takes the norm of the whole model.

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
                each rank from which it receives: a variable, or a tuple if the sender's
                component returned several variables.
            rank_in: the rank, or an iterable of ranks, from which the component receives
                its arguments, in this order; None for the arguments of the model.
            rank_out: the rank, or an iterable of ranks, to which its result is sent;
                None if the result is the model's output, which only one component can
                give. A rank may send to a later component of its own.

        Raises:
            TypeError: ``link`` is no link.
            ValueError: there is no such rank, a list of ranks is empty, or another
                component already gives the model's output.
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
        # A new list, because a copy of the model has the old list.
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
            TypeError: a component with a ``rank_out`` returned something other than a
                variable, an array, or a tuple or list of these, such as None.
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
        # The results for later components of this rank.
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
