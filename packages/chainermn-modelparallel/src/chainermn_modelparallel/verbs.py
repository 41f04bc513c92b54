"""The collective verbs as functions of Chainer, each with the verb that takes its gradients back.

What moves arrays from rank to rank is linear, so backward is again such a verb, its adjoint; and
so on for higher derivatives. The loss whose gradients these are is the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np
from chainer import Variable, backend

from chainermn_comm import CommunicatorBase
from chainermn_comm.watchdog import annotate
from chainermn_modelparallel.calls import NO_CALL, View, agree
from chainermn_modelparallel.communication import FUNCTIONS, Communication, setting
from chainermn_modelparallel.delegates import empty_beside, go_on, pseudo_connect

Arrays = tuple[Any, ...]


@dataclass(frozen=True)
class Verb:
    """How arrays move, and the verb that moves their gradients.

    Attributes:
        move: takes the communicator, this rank's arrays and the root; returns this rank's
            results. Either is empty on ranks that give or get nothing. Collective.
        adjoint: the name of the verb for the gradients.
    """

    move: Callable[[CommunicatorBase, Arrays, int], Arrays]
    adjoint: str


def _bcast(comm: CommunicatorBase, arrays: Arrays, root: int) -> Arrays:
    return (comm.bcast(arrays[0] if arrays else None, root=root),)


def _reduce(comm: CommunicatorBase, arrays: Arrays, root: int) -> Arrays:
    total = comm.allreduce(arrays[0])
    return (total,) if comm.rank == root else ()


def _gather(comm: CommunicatorBase, arrays: Arrays, root: int) -> Arrays:
    found = comm.gather(arrays[0], root=root)
    return tuple(found) if comm.rank == root else ()


def _reduce_scatter(comm: CommunicatorBase, arrays: Arrays, _: int) -> Arrays:
    """The sum of what all ranks have for this one, in rank order, in float32 or wider."""
    rows = comm.alltoall(arrays)
    dtype = rows[0].dtype
    total = rows[0].astype(np.float32 if dtype == np.float16 else dtype)
    for row in rows[1:]:
        total += row
    return (total.astype(dtype, copy=False),)


VERBS = {
    "bcast": Verb(_bcast, "reduce"),
    "reduce": Verb(_reduce, "bcast"),
    "gather": Verb(_gather, "scatter"),
    "scatter": Verb(lambda comm, xs, root: (comm.scatter(xs or None, root=root),), "gather"),
    "alltoall": Verb(lambda comm, xs, _: tuple(comm.alltoall(xs)), "alltoall"),
    "allgather": Verb(lambda comm, xs, _: tuple(comm.allgather(xs[0])), "reduce_scatter"),
    "reduce_scatter": Verb(_reduce_scatter, "allgather"),
    "allreduce": Verb(lambda comm, xs, _: (comm.allreduce(xs[0]),), "allreduce"),
    "mean": Verb(lambda comm, xs, _: (comm.multi_node_mean(xs[0]),), "mean"),
    # For values that are the same on all ranks, whose loss is counted once: see replicas.py.
    "copy": Verb(lambda comm, xs, _: xs, "total"),
    "total": Verb(lambda comm, xs, _: (comm.allreduce(xs[0]),), "copy"),
    "pick": Verb(lambda comm, xs, _: (xs[comm.rank],), "join"),
    "join": Verb(lambda comm, xs, _: tuple(comm.allgather(xs[0])), "pick"),
}


def carry_out(
    comm: CommunicatorBase,
    verb: str,
    variables: tuple[Variable, ...] | None,
    root: int = 0,
    view: View = (),
    problem: BaseException | None = None,
    bystanders: tuple[Variable, ...] = (),
    forward: int = NO_CALL,
) -> tuple[Variable, ...]:
    """Call a verb on variables (collective).

    Args:
        comm: the ranks that take part.
        verb: one of ``VERBS``.
        variables: what this rank gives; anything if there is a problem.
        root: for verbs that have one.
        view: what must be equal on all ranks; by default the verb and its root.
        problem: why this rank can't take part.
        bystanders: variables that are not used, but that backward is to visit too; they get
            gradients of zeros.
        forward: for backward, the number of the call; see :func:`agree`.

    Returns:
        This rank's results. A rank that gets none has an empty delegate variable instead if
        backward has to run, else nothing.
    """
    view = view or (("operation", verb), ("root", root))
    if problem is not None or variables is None:
        variables = ()
    given = variables + bystanders
    call = agree(comm, view, problem, wants=True in wanted(given), forward=forward)
    node = Collective(comm, verb, root, len(variables), (view[0][1], call.number))
    if not call.wanted:  # on no rank, so no backward shall ever wait here
        with chainer.using_config("enable_backprop", False):
            outputs = node.apply(given)
        return tuple([Variable(y.array, requires_grad=False) for y in outputs if node.forms])
    # Without an input that requires a gradient, Chainer would not call backward on this rank.
    xp = backend.get_array_module(*given)
    return node.apply((*given, Variable(xp.empty(0, np.float32))))


def wanted(variables: tuple[Variable, ...]) -> list[bool]:
    """For each of the variables, whether this process needs its gradient."""
    builds_graph = bool(setting("enable_backprop"))
    return [builds_graph and x.requires_grad and x.dtype.kind == "f" for x in variables]


class Collective(Communication):
    """One call of a verb.

    Inputs: what it uses, bystanders, and an empty leaf if backward will run. Outputs: this rank's
    results, or an empty one if there are none.

    After ``forward``:

    Attributes:
        forms: shape and dtype of each result; none on ranks that get nothing.
    """

    def __init__(
        self, comm: CommunicatorBase, verb: str, root: int, used: int, name: tuple[str, int]
    ) -> None:
        self._comm = comm
        self._verb = verb
        self._root = root
        self._used = used
        self._name = name
        self.forms: list[tuple[tuple[int, ...], np.dtype]] = []

    @property
    def label(self) -> str:
        return self._verb

    def forward(self, inputs: Arrays) -> Arrays:
        with annotate(FUNCTIONS + self._name[0]):
            found = VERBS[self._verb].move(self._comm, inputs[: self._used], self._root)
        outputs = tuple(np.asarray(y) if isinstance(y, np.generic) else y for y in found)
        self.empty = empty_beside((*outputs, *inputs, None)[0])
        self.forms = [(y.shape, y.dtype) for y in outputs]
        return outputs or (self.empty,)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        operation, number = self._name
        gradients = tuple(
            Variable(self._xp.zeros(*form), requires_grad=False) if gradient is None else gradient
            for form, gradient in zip(self.forms, grad_outputs, strict=False)
        )
        bystanders: tuple[Variable, ...] = ()
        if chainer.config.enable_backprop:
            bystanders = (self.thread(),)
            bystanders = go_on(grad_outputs[len(self.forms) :], bystanders)
            gradients = tuple(pseudo_connect(*bystanders, each) for each in gradients)
        view: View = (("operation", f"backward of {operation}"),)
        adjoint = VERBS[self._verb].adjoint
        found = carry_out(
            self._comm,
            adjoint,
            gradients,
            self._root,
            view,
            bystanders=bystanders,
            forward=number,
        )
        return tuple(self._gradient(index, found) for index in indexes)

    def _gradient(self, index: int, found: tuple[Variable, ...]) -> Variable | None:
        node = self.inputs[index]
        if node.dtype.kind != "f" or index == len(self.inputs) - 1:  # the last is the empty leaf
            return None
        if index < self._used:
            return found[index]
        zeros = Variable(self._xp.zeros(node.shape, node.dtype), requires_grad=False)
        # The way to this rank's part in a second backward.
        return pseudo_connect(found[0], zeros) if found else zeros
