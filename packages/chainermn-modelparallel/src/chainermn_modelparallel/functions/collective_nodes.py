"""Collective operations as functions of Chainer; each names the operation for its gradients.

Operations that move arrays between ranks are linear, so backward is the adjoint
operation, and so on for higher derivatives. The loss that is differentiated is the sum
of all ranks' losses.

The operations of a region are for ranks that divide one model's arithmetic rather than
its data. All of them compute the same loss from the same values, so the loss counts
once: the gradient of a sum over ranks is, for each rank's term, the sum's own gradient,
of which every rank has a copy; and the gradient of a value that all ranks use is the
sum of what each of them computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from chainer import Variable, backend

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import raise_together

from .arguments import check_communicator
from .call_handshake import Handshake, Signature, handshake
from .control_dependencies import (
    Arrays,
    Gradients,
    Variables,
    empty_on_device_of,
    keep_control_dependencies,
    zeros_for_input,
)
from .equal_values import check_equal, project
from .ordered_function import SCOPE, OrderedFunctionNode, requires_grad_mask

# A collective function of the communicator, this rank's arrays and the root; returns this
# rank's results. A rank that gives nothing has no arrays, and a rank that gets nothing has
# no results.
Operation = Callable[[CommunicatorBase, Arrays, int], Arrays]


def _reduce(comm: CommunicatorBase, arrays: Arrays, root: int) -> Arrays:
    total = comm.allreduce(arrays[0])
    return (total,) if comm.rank == root else ()


# Each operation by its name, with the name of the operation for its gradients.
OPS: dict[str, tuple[Operation, str]] = {
    "bcast": (
        lambda comm, xs, root: (comm.bcast(xs[0] if xs else None, root=root),),
        "reduce",
    ),
    "reduce": (_reduce, "bcast"),
    "gather": (lambda comm, xs, root: comm.gather(xs[0], root=root) or (), "scatter"),
    "scatter": (
        lambda comm, xs, root: (comm.scatter(xs or None, root=root),),
        "gather",
    ),
    "alltoall": (lambda comm, xs, _: comm.alltoall(xs), "alltoall"),
    "allgather": (lambda comm, xs, _: comm.allgather(xs[0]), "reduce_scatter"),
    "reduce_scatter": (lambda comm, xs, _: (comm.reduce_scatter(xs),), "allgather"),
    "sum": (lambda comm, xs, _: (comm.allreduce(xs[0]),), "sum"),
    "mean": (lambda comm, xs, _: (comm.multi_node_mean(xs[0]),), "mean"),
    # These two begin a region with values that are equal on all ranks. In the region each
    # rank has all of the values, or only its own value.
    "copy_to_region": (lambda comm, xs, _: xs, "reduce_from_region"),
    "split_to_region": (lambda comm, xs, _: (xs[comm.rank],), "gather_from_region"),
}
# These two end a region: every rank gets the sum of the ranks' values, or all of them.
OPS["reduce_from_region"] = (OPS["sum"][0], "copy_to_region")
OPS["gather_from_region"] = (OPS["allgather"][0], "split_to_region")

# The inputs of these operations must be equal on all ranks, in forward and in backward.
_TAKE_EQUAL_VALUES = ("copy_to_region", "split_to_region")


class Inputs(NamedTuple):
    """The inputs of this rank in a collective operation."""

    variables: Variables
    # Backward visits these variables, too, and gives them gradients of zeros. The
    # operation doesn't use their values.
    control_inputs: Variables = ()
    root: int = 0  # operations without a root ignore it
    signature: Signature = ()  # further entries that must be equal on all ranks
    # The values of these variables must be equal on all ranks. The operation doesn't use
    # them.
    replicas: Variables = ()


def apply_collective(
    comm: CommunicatorBase,
    op: str,
    make_inputs: Callable[[], Inputs],
    operation: str = "",
    forward: Handshake | None = None,
) -> Variables:
    """Apply one of ``OPS`` to variables, and return this rank's results (collective).

    An error of ``make_inputs`` is raised here, and makes the other ranks raise. Reports
    and errors name the call ``operation``, by default ``op``. If backward has to run, a
    rank that gets no result gets an empty delegate variable instead. Otherwise it gets
    an empty tuple.

    Raises:
        TypeError: ``comm`` is no communicator.
        PeerError: another rank raised an error before it came here.
        RankMismatchError: on all ranks, as by :func:`handshake`; also if values that
            must be equal on all ranks differ.
    """
    comm = check_communicator(comm)
    operation = operation or op
    with raise_together(comm.handshake, SCOPE + operation, meet=False):
        inputs = make_inputs()
        replicas = inputs.replicas
        if op in _TAKE_EQUAL_VALUES:
            replicas += inputs.variables
        projections = project(replicas)
    variables = inputs.variables + inputs.control_inputs
    call = handshake(
        comm,
        operation,
        (("root", inputs.root), *inputs.signature),
        requires_grad=1 in requires_grad_mask(variables),
        payload=projections,
        forward=forward,
    )
    check_equal(operation, call.payloads, replicas, comm.rank)
    node = CollectiveFunction(
        comm, inputs.root, len(inputs.variables), operation, call, op
    )
    arrays = tuple([variable.array for variable in variables])
    if not call.requires_grad:  # no rank needs a gradient, so backward won't come
        results = node.forward(arrays)[:-1]
        return tuple([Variable(y, requires_grad=False) for y in results])
    # Without an input that requires a gradient, Chainer would not call backward on this
    # rank.
    leaf = Variable(empty_on_device_of((*arrays, None)[0]))
    outputs = node.apply((*variables, leaf))
    return outputs[:-1] or outputs  # the last output is empty


def array_specs(variables: Variables) -> Signature:
    """Return the signature by which ranks compare dtypes and shapes of variables."""
    return tuple(
        (f"dtype and shape of variable {index}", variable.dtype, variable.shape)
        for index, variable in enumerate(variables)
    )


@dataclass(eq=False, repr=False)
class CollectiveFunction(OrderedFunctionNode):
    """One call of a collective operation.

    Its inputs are the operation's inputs, control inputs, and an empty leaf if backward
    will run. Its outputs are this rank's results, if any.
    """

    comm: CommunicatorBase
    root: int
    num_inputs: int
    operation: str
    call: Handshake
    label: str = ""  # a name in `OPS`; Chainer shows it in graphs and reports

    def forward(self, inputs: Arrays) -> Arrays:
        run, _ = OPS[self.label]
        results = run(self.comm, inputs[: self.num_inputs], self.root)
        xp = backend.get_array_module(*results)
        outputs = tuple([xp.asarray(y) for y in results])
        return self.with_delegate_output(outputs, like=(*outputs, *inputs)[0])

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        operation = f"backward of {self.operation}"
        self.call.require_graph(operation, self.comm.rank)
        gradients = self.connected_gradients(grad_outputs)
        inputs = Inputs(gradients, self.control_gradient(grad_outputs), self.root)
        _, adjoint = OPS[self.label]
        results = apply_collective(
            self.comm, adjoint, lambda: inputs, operation, self.call
        )
        return tuple(self._input_gradient(index, results) for index in indexes)

    def _input_gradient(self, index: int, results: Variables) -> Variable | None:
        if self.inputs[index].dtype.kind != "f":
            return None
        if index < self.num_inputs:
            return results[index]
        zeros = zeros_for_input(self, index)
        # A second backward comes to this rank's part through the results.
        return keep_control_dependencies(results[:1], (zeros,))[0]
