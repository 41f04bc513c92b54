"""Collective operations as functions of Chainer, each with the operation for its gradients.

What moves arrays between ranks is linear, so backward is the adjoint operation, and so
on for higher derivatives. The loss that is differentiated is the sum of all ranks'
losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import chainer
import numpy as np
from chainer import Variable

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import raise_together

from .arguments import check_communicator
from .call_handshake import NO_CALL, Handshake, Signature, handshake
from .control_dependencies import (
    keep_control_dependencies,
    pseudo_connect,
    zeros_for_input,
)
from .equal_values import check_equal, project, side_by_side
from .ordered_function import (
    SCOPE,
    Arrays,
    Gradients,
    OrderedFunctionNode,
    Variables,
    empty_on_device_of,
    requires_grad_mask,
)

# Takes the communicator, this rank's arrays and the root; returns this rank's results.
# Either is empty on ranks that give or get nothing. Collective.
Operation = Callable[[CommunicatorBase, Arrays, int], Arrays]


def _reduce(comm: CommunicatorBase, arrays: Arrays, root: int) -> Arrays:
    total = comm.allreduce(arrays[0])
    return (total,) if comm.rank == root else ()


def _allgather(comm: CommunicatorBase, arrays: Arrays, _: int) -> Arrays:
    return tuple(comm.allgather(arrays[0]))


def _allreduce(comm: CommunicatorBase, arrays: Arrays, _: int) -> Arrays:
    return (comm.allreduce(arrays[0]),)


# By name: the operation, and the name of the one for its gradients.
OPS: dict[str, tuple[Operation, str]] = {
    "bcast": (
        lambda comm, xs, root: (comm.bcast(xs[0] if xs else None, root=root),),
        "reduce",
    ),
    "reduce": (_reduce, "bcast"),
    "gather": (
        lambda comm, xs, root: tuple(comm.gather(xs[0], root=root) or ()),
        "scatter",
    ),
    "scatter": (
        lambda comm, xs, root: (comm.scatter(xs or None, root=root),),
        "gather",
    ),
    "alltoall": (lambda comm, xs, _: tuple(comm.alltoall(xs)), "alltoall"),
    "allgather": (_allgather, "reduce_scatter"),
    "reduce_scatter": (lambda comm, xs, _: (comm.reduce_scatter(xs),), "allgather"),
    "allreduce": (_allreduce, "allreduce"),
    "mean": (lambda comm, xs, _: (comm.multi_node_mean(xs[0]),), "mean"),
    # For values that are equal on all ranks, whose loss counts once: see
    # tensor_parallel_ops.py.
    "copy_to_region": (lambda comm, xs, _: xs, "reduce_from_region"),
    "reduce_from_region": (_allreduce, "copy_to_region"),
    "split_to_region": (lambda comm, xs, _: (xs[comm.rank],), "gather_from_region"),
    "gather_from_region": (_allgather, "split_to_region"),
}


# Operations whose inputs ranks have alike, forward and backward.
_TAKE_EQUAL_VALUES = ("copy_to_region", "split_to_region")


class Inputs(NamedTuple):
    """What this rank gives to a collective operation."""

    variables: Variables
    # Not used by the operation; backward is to visit them too, and gives them zeros.
    control_inputs: Variables = ()
    root: int | None = None  # of operations that have one
    signature: Signature = ()  # what else must be equal on all ranks
    # Not used either: arrays whose values must be equal on all ranks.
    replicas: Arrays = ()


def apply_collective(
    comm: CommunicatorBase,
    op: str,
    make_inputs: Callable[[], Inputs],
    operation: str = "",
    forward_id: int = NO_CALL,
) -> Variables:
    """Apply one of ``OPS`` to variables, and return this rank's results (collective).

    What ``make_inputs`` raises is raised here, and makes the other ranks raise. Reports
    and errors name the call ``operation``, by default ``op``. A rank that gets no
    result has an empty delegate variable instead if backward has to run, else nothing.

    Raises:
        TypeError: ``comm`` is no communicator.
        PeerError, RankMismatchError: as for :func:`handshake`, also for ``forward_id``,
            and if values differ that must be equal.
    """
    comm = check_communicator(comm)
    operation = operation or op
    with raise_together(comm.handshake, SCOPE + operation, meet=False):
        inputs = make_inputs()
        replicas = inputs.replicas
        if op in _TAKE_EQUAL_VALUES:
            replicas = (side_by_side(inputs.variables), *replicas)
        projections = project(replicas)
    signature = inputs.signature
    if inputs.root is not None:
        signature = (("root", inputs.root), *signature)
    variables = inputs.variables + inputs.control_inputs
    call = handshake(
        comm,
        operation,
        signature,
        requires_grad=1 in requires_grad_mask(variables),
        payload=projections,
        forward_id=forward_id,
    )
    check_equal(operation, call.payloads, replicas, comm.rank)
    node = CollectiveFunction(
        comm, inputs.root, len(inputs.variables), operation, call, op
    )
    if not call.requires_grad:  # on no rank, so backward must not wait here
        with chainer.using_config("enable_backprop", False):
            results = node.apply(variables)[:-1]
        return tuple(Variable(y.array, requires_grad=False) for y in results)
    # Without an input that requires a gradient, Chainer would not call backward on this
    # rank.
    leaf = Variable(empty_on_device_of(variables[0].array if variables else None))
    outputs = node.apply((*variables, leaf))
    return outputs[:-1] or outputs  # the last one is empty


def array_specs(variables: Variables) -> Signature:
    """Return the signature that makes dtypes and shapes equal on all ranks."""
    return tuple(
        (f"dtype and shape of variable {index}", variable.dtype, variable.shape)
        for index, variable in enumerate(variables)
    )


@dataclass(eq=False, repr=False)
class CollectiveFunction(OrderedFunctionNode):
    """One call of a collective operation.

    Inputs: those of the operation, control inputs, and an empty leaf if backward will
    run. Outputs: this rank's results, if any.
    """

    comm: CommunicatorBase
    root: int | None
    num_inputs: int
    operation: str
    call: Handshake
    label: str = ""  # one of `OPS`; Chainer shows it in graphs and reports
    # After `forward`: shape and dtype of each result; none on ranks that get nothing.
    specs: tuple[tuple[tuple[int, ...], np.dtype], ...] = ()

    def forward(self, inputs: Arrays) -> Arrays:
        run, _ = OPS[self.label]
        results = run(self.comm, inputs[: self.num_inputs], self.root or 0)
        outputs = tuple(
            np.asarray(y) if isinstance(y, np.generic) else y for y in results
        )
        self.specs = tuple((y.shape, y.dtype) for y in outputs)
        return self.with_control_output(outputs, like=(*outputs, *inputs, None)[0])

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        operation = f"backward of {self.operation}"
        self.call.require_graph(operation, self.comm.rank)
        gradients: Variables = ()
        for spec, gradient in zip(self.specs, grad_outputs, strict=False):
            if gradient is None:
                gradient = Variable(self.xp.zeros(*spec), requires_grad=False)
            gradients += (gradient,)
        control: Variables = ()
        if chainer.config.enable_backprop:
            control = keep_control_dependencies(
                grad_outputs[-1:], (self.control_output(),)
            )
            gradients = tuple(pseudo_connect(*control, each) for each in gradients)
        _, adjoint = OPS[self.label]
        inputs = Inputs(gradients, control, self.root)
        results = apply_collective(
            self.comm, adjoint, lambda: inputs, operation, self.call.call_id
        )
        return tuple(self._input_gradient(index, results) for index in indexes)

    def _input_gradient(self, index: int, results: Variables) -> Variable | None:
        # The last input is the empty leaf.
        if self.inputs[index].dtype.kind != "f" or index == len(self.inputs) - 1:
            return None
        if index < self.num_inputs:
            return results[index]
        zeros = zeros_for_input(self, index)
        # A second backward comes to this rank's part through it.
        return pseudo_connect(results[0], zeros) if results else zeros
