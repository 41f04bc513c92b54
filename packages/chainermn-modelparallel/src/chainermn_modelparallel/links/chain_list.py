"""`MultiNodeChainList`: a model whose components lie on several ranks."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import chainer
from chainer import Variable

from chainermn_comm import CommunicatorBase

from ..functions import (
    check_communicator,
    check_integer,
    check_peer,
    connect_outputs,
    recv_variables,
    send,
)
from ..loss_scaling import refuse_unshared_scale

# The ranks to which a component sends, or from which it receives, in order; None stands
# for the model's arguments or output.
Route = tuple[int, ...] | None


class MultiNodeChainList(chainer.ChainList):
    """This rank's components of a model that spans ranks.

    Each rank makes one, adds its components with :meth:`add_link` and calls it; what a
    component returns goes to other ranks' components. Components run in the order in
    which they were added, and backward visits them the other way round, on each rank,
    so backward meets no deadlock that forward did not.

    Calling it runs forward. Its arguments go to each component with ``rank_in=None``;
    it returns what the component with ``rank_out=None`` returned, whatever that is;
    backward through the variables in it, also within tuples, lists and dicts, goes on
    to the other ranks. A rank without such a component gets a delegate variable without
    data (float32 of shape ``(0,)``); call its ``backward``, which takes part in the
    other ranks' backward. Gradients can't be differentiated again by way of a rank
    whose first component begins with what it receives: there is no variable of its own
    from which it could take part in a second backward, so that one raises
    RankMismatchError on the rank that sent. Write that with :func:`recv` and its
    ``delegate_variable``.

    It holds only this rank's parameters: optimizers, serializers and ``to_device`` work
    as with any :class:`chainer.ChainList`. A copy, deep or not, has the same
    communicator.

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
        self._routes: list[tuple[Route, Route]] = []

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
            rank_out: the rank, or ranks likewise, to which what it returns is sent;
                None to make that the model's output. Only one component can give the
                model's output. A rank may send to a later component of its own.

        Raises:
            TypeError: ``link`` is no link, or a rank no integer.
            ValueError: there is no such rank, a list of them is empty, or another
                component gives the model's output already.
        """
        here = self._comm.rank
        if not isinstance(link, chainer.Link):
            raise TypeError(
                f"rank {here}: a component must be a chainer.Link, not {type(link).__name__}"
            )
        route = (
            self._check_ranks("rank_in", rank_in),
            self._check_ranks("rank_out", rank_out),
        )
        if route[1] is None and any(rank_out is None for _, rank_out in self._routes):
            raise ValueError(
                f"rank {here}: another component has rank_out=None already, and a model has one "
                "output; let one component return a tuple"
            )
        super().add_link(link)
        # A new list: a copy of the model has the old one.
        self._routes = [*self._routes, route]

    def _check_ranks(self, name: str, ranks: Any) -> Route:
        if ranks is None:
            return None
        several = tuple(ranks) if isinstance(ranks, Iterable) else (ranks,)
        if not several:
            raise ValueError(
                f"rank {self._comm.rank}: {name} must not be empty; None means none"
            )
        here = self._comm.rank
        numbers = [check_integer("rank", rank, here) for rank in several]
        return tuple(r if r == here else check_peer(self._comm, r)[0] for r in numbers)

    def forward(self, *inputs: Any) -> Any:
        """Run this rank's components; see the class (collective: all with components call it).

        Raises:
            TypeError: a component with a ``rank_out`` returned something else than a
                variable, an array, or a tuple or list of them; None, if it has no
                ``return``.
            ValueError: there is no component, or what goes to or from a component of
                this rank has no counterpart here.
            RuntimeError: it is called by an optimizer's ``update`` that adapts a loss
                scale of this rank's own; see :func:`share_loss_scale`.
        """
        here = self._comm.rank
        refuse_unshared_scale(here)
        if not self._routes or len(self._routes) != len(self):
            raise ValueError(
                f"rank {here}: add each component with add_link, and at least one"
            )
        outputs: Any = None
        has_outputs = False
        # Depends on all that was sent and received so far.
        delegate: Variable | None = None
        not_twice_differentiable = True  # unless this rank sent before it received
        local: deque[Any] = deque()  # sent to a later component of this rank
        for index, (link, (rank_in, rank_out)) in enumerate(
            zip(self, self._routes, strict=True)
        ):
            arguments = inputs
            if rank_in is not None:
                received = []
                for rank in rank_in:
                    if rank == here:
                        if not local:
                            raise ValueError(
                                f"rank {here}: a component receives from its own rank {here}, and "
                                f"no earlier one has rank_out={here} for it"
                            )
                        received.append(local.popleft())
                    else:
                        variables, node = recv_variables(
                            self._comm,
                            rank,
                            delegate,
                            not_twice_differentiable=not_twice_differentiable,
                        )
                        delegate = delegate if node is None else node.control_output()
                        received.append(
                            variables[0] if len(variables) == 1 else variables
                        )
                arguments = tuple(received)
            returned = link(*arguments)
            if rank_out is None:
                outputs, has_outputs = returned, True
                continue
            _check_returned(
                returned, f"rank {here}: component {index} ({type(link).__name__})"
            )
            for rank in rank_out:
                if rank == here:
                    local.append(returned)
                else:
                    not_twice_differentiable &= delegate is not None
                    delegate = send(
                        connect_outputs(delegate, returned), self._comm, rank
                    )
        if local:
            raise ValueError(
                f"rank {here}: a component sends to its own rank {here}, and no later one has "
                f"rank_in={here}"
            )
        return _connect_variables(delegate, outputs) if has_outputs else delegate


def _connect_variables(delegate: Variable | None, outputs: Any) -> Any:
    """Return the model's output, with a control dependency on the delegate in its variables."""
    if delegate is None or not delegate.requires_grad:
        return outputs
    if isinstance(outputs, Variable):
        return connect_outputs(delegate, outputs)
    if isinstance(outputs, dict):
        connected = copy.copy(outputs)
        connected.update(
            (key, _connect_variables(delegate, x)) for key, x in outputs.items()
        )
        return connected
    if isinstance(outputs, (tuple, list)):
        items = [_connect_variables(delegate, x) for x in outputs]
        make = getattr(outputs, "_make", type(outputs))  # of a named tuple
        return make(items)
    return outputs


def _check_returned(returned: Any, component: str) -> None:
    items = returned if isinstance(returned, (tuple, list)) else (returned,)
    kinds = (Variable, *chainer.get_array_types())
    wrong = [type(item).__name__ for item in items if not isinstance(item, kinds)]
    if wrong or not items:
        raise TypeError(
            f"{component} must return a variable, an array, or a tuple or list of them, got "
            f"{wrong[0] if wrong else 'an empty one'}"
        )
