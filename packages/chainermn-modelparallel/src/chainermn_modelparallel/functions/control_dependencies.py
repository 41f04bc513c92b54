"""Delegate variables: paths in the computational graph that carry no data."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer import Variable, backend

from .ordered_function import NOTHING, setting


def pseudo_connect(delegate_variable: Variable, *actual_variables: Any) -> Any:
    """Make some variables depend on another one, for the sake of backward.

    The results hold the actual variables' data. Backward through any of them gives the actual
    variables their gradients as they are, and goes on to ``delegate_variable`` with a gradient
    of zeros. So one ``backward`` reaches parts of the graph that only communication connects.
    Where it begins at a single result without a gradient, as of a delegate, both get zeros.
    Not collective; differentiable any number of times.

    Args:
        delegate_variable: what backward is to visit too, of any shape and dtype, and on any
            device: usually what :func:`~chainermn.functions.send` returned.
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
    first = chainer.as_variable(actual_variables[0]).array
    inputs = (brought_beside(first, delegate_variable), *actual_variables)
    outputs = PseudoConnect().apply(inputs)
    return outputs[0] if len(outputs) == 1 else outputs


def connect(delegate: Variable | None, outputs: Any) -> Any:
    """The outputs, whose backward goes on to the delegate too, where there is one to go to."""
    if delegate is None or not delegate.requires_grad:
        return outputs
    if isinstance(outputs, (tuple, list)):
        connected = pseudo_connect(delegate, *outputs)
        return connected if isinstance(connected, tuple) else (connected,)
    return pseudo_connect(delegate, outputs)


def go_on(gradients: tuple[Variable | None, ...], results: tuple[Any, ...]) -> tuple[Any, ...]:
    """What backward returns, leading to gradients that it got too, though it has no use for them.

    Such a gradient of zeros may be what leads to a communication of the first backward, to which
    the second one has to come. Nothing is changed where no gradients are differentiated again.
    """
    if setting("enable_backprop"):
        for gradient in gradients:
            results = tuple(None if x is None else connect(gradient, x) for x in results)
    return results


def empty_beside(array: Any) -> Any:
    """An array without data, of the same array module and device as another."""
    xp = backend.get_array_module(array)
    if xp is np:
        return NOTHING
    with chainer.using_device(backend.get_device_from_array(array)):
        return xp.empty_like(array, dtype=np.float32, shape=(0,))


def brought_beside(array: Any, delegate: Variable) -> Variable:
    """The delegate, or one of the array's kind that leads to it: Chainer mixes no kinds."""
    if array is None or delegate.array is None:
        return delegate
    if chainer.is_arrays_compatible((array, delegate.array)):
        return delegate
    return Bridge(empty_beside(array)).apply((delegate,))[0]


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
        zeros: tuple[Variable, ...] = ()
        if 0 in indexes:
            zeros = go_on(grad_outputs, (zeros_for(self, 0, self._xp),))
        if len(grad_outputs) == 1 and grad_outputs[0] is None:
            # Backward starts here, without a gradient as from delegates, and has to go both ways.
            grad_outputs = (zeros_for(self, 1, self._xp),)
        return tuple(grad_outputs[index - 1] if index > 0 else zeros[0] for index in indexes)


class Bridge(chainer.FunctionNode):
    """Leads from an array without data to a delegate whose array is of another kind."""

    def __init__(self, empty: Any) -> None:
        self._empty = empty

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._xp = backend.get_array_module(*inputs)
        return (self._empty,)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        return go_on(grad_outputs, (zeros_for(self, 0, self._xp),))
