"""Delegate variables: paths in the computational graph that carry no data."""

from __future__ import annotations

from typing import Any

import chainer
from chainer import Variable, backend


def pseudo_connect(delegate_variable: Variable, *actual_variables: Any) -> Any:
    """Make some variables depend on another one, for the sake of backward.

    The results hold the actual variables' data. Backward through any of them gives the actual
    variables their gradients as they are, and goes on to ``delegate_variable`` with a gradient
    of zeros. So one ``backward`` reaches parts of the graph that only communication connects.
    Not collective; differentiable any number of times.

    Args:
        delegate_variable: what backward is to visit too, of any shape and dtype: usually what
            :func:`~chainermn.functions.send` returned.
        actual_variables: variables or arrays, at least one, of any shape and dtype.

    Returns:
        A variable, or a tuple of them if there are several actual variables.

    Raises:
        TypeError: ``delegate_variable`` is no variable, an actual one is neither variable nor
            array, or there is none.
    """
    if not isinstance(delegate_variable, Variable):
        raise TypeError(
            f"delegate_variable must be a chainer.Variable, got {type(delegate_variable).__name__}"
        )
    if not actual_variables:
        raise TypeError("pseudo_connect needs at least one actual variable")
    for variable in actual_variables:
        if not isinstance(variable, (Variable, *chainer.get_array_types())):
            raise TypeError(
                "actual variables must be variables or arrays, one by one (write * before a "
                f"tuple), got {type(variable).__name__}"
            )
    outputs = PseudoConnect().apply((delegate_variable, *actual_variables))
    return outputs[0] if len(outputs) == 1 else outputs


def connect(delegate: Variable | None, outputs: Any) -> Any:
    """The outputs, whose backward goes on to the delegate too, where there is one to go to."""
    if delegate is None or not delegate.requires_grad:
        return outputs
    if isinstance(outputs, (tuple, list)):
        connected = pseudo_connect(delegate, *outputs)
        return connected if isinstance(connected, tuple) else (connected,)
    return pseudo_connect(delegate, outputs)


def zeros_for(function: chainer.FunctionNode, index: int, xp: Any) -> Variable:
    """A gradient of zeros for an input of the function, made by array module ``xp``."""
    node = function.inputs[index]
    return Variable(xp.zeros(node.shape, node.dtype), requires_grad=False)


class PseudoConnect(chainer.FunctionNode):
    """Input 0 is the delegate; the outputs are the other inputs."""

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._xp = backend.get_array_module(inputs[0])
        return inputs[1:]

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        return tuple(
            grad_outputs[index - 1] if index > 0 else zeros_for(self, 0, self._xp)
            for index in indexes
        )
