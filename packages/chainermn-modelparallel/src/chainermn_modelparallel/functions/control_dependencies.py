"""Control dependencies: paths in the computational graph that carry no data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer
import numpy as np
from chainer import Variable, backend

Arrays = tuple[Any, ...]
Variables = tuple[Variable, ...]
Gradients = tuple[Variable | None, ...]

EMPTY = np.empty(0, np.float32)


def pseudo_connect(delegate_variable: Variable | None, *actual_variables: Any) -> Any:
    """Make variables depend on a delegate variable, so that backward reaches it (not collective).

    The results hold the data of the actual variables. Backward through a result passes
    its gradient on to the actual variable, and visits ``delegate_variable`` with a
    gradient of zeros. So one ``backward`` reaches parts of the graph that only
    communication connects. If backward begins at a result without a gradient, as it
    does at a delegate variable, both variables get zeros. The function can be
    differentiated any number of times.

    Args:
        delegate_variable: the variable that backward should also visit, with any shape
            and dtype and on any device: usually the result of
            :func:`~chainermn.functions.send`. None if there is nothing to visit, as on
            the last rank of :func:`create_multi_node_n_step_rnn`.
        actual_variables: at least one variable or array, with any shapes and dtypes.

    Returns:
        A variable, or a tuple of variables if there are several actual variables. A
        single scalar, such as a loss, can also be unpacked like a tuple of one variable,
        as in Chainer 7's ``chainermn``.

    Raises:
        TypeError: ``delegate_variable`` is neither a variable nor None, an actual
            variable is neither a variable nor an array, or there are no actual variables.
    """
    if delegate_variable is None:
        delegate_variable = Variable(EMPTY, requires_grad=False)
    if not isinstance(delegate_variable, Variable):
        raise TypeError(
            f"delegate_variable must be a chainer.Variable, got {type(delegate_variable).__name__}"
        )
    if not actual_variables:
        raise TypeError("pseudo_connect needs at least one actual variable")
    outputs = _connect(delegate_variable, actual_variables)
    if len(outputs) > 1:
        return outputs
    if outputs[0].ndim == 0:
        outputs[0].__class__ = ScalarVariable
    return outputs[0]


class ScalarVariable(Variable):
    """A variable without dimensions that can also be unpacked like a tuple of itself.

    ChainerMN 1.3 returned a variable (``y = pseudo_connect(...)``), and Chainer 7 a tuple
    of one variable (``y, = pseudo_connect(...)``). Both ways of writing work.
    """

    def __iter__(self) -> Iterator[Variable]:
        yield self

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return (self,)[index]
        return super().__getitem__(index)


def keep_control_dependencies(sources: Gradients, results: Variables) -> Variables:
    """Return results that also depend on each source that is connected to the graph.

    Sources are delegate variables, and gradients that backward gets but doesn't use. Such
    a gradient may lead a second backward to a communication of the first backward.
    """
    if chainer.config.enable_backprop and results:
        for source in sources:
            if source is not None and source.requires_grad:
                results = _connect(source, results)
    return results


def _connect(delegate: Variable, variables: Arrays) -> Variables:
    first = chainer.as_variable(variables[0]).array
    inputs = (delegate_on_device_of(first, delegate), *variables)
    outputs: Variables = PseudoConnect().apply(inputs)
    return outputs


def delegate_on_device_of(array: Any, delegate: Variable) -> Variable:
    """Return a delegate that can be an input beside the array: Chainer mixes no array modules."""
    if chainer.is_arrays_compatible((array, delegate.array)):
        return delegate
    return PseudoConnect(empty_on_device_of(array)).apply((delegate,))[0]


def empty_on_device_of(array: Any) -> Any:
    """Return an array without data, of the array module and device of another."""
    xp = backend.get_array_module(array)
    if xp is np:
        return EMPTY
    with chainer.using_device(backend.get_device_from_array(array)):
        return xp.empty_like(array, dtype=np.float32, shape=(0,))


def zeros_for_input(function: Any, index: int) -> Variable:
    """Return a gradient of zeros for an input of a function that knows its array module."""
    node = function.inputs[index]
    return Variable(function.xp.zeros(node.shape, node.dtype), requires_grad=False)


class PseudoConnect(chainer.FunctionNode):
    """Input 0 is the delegate; the outputs are the other inputs, or else the empty array."""

    def __init__(self, empty_array: Any = None) -> None:
        self._empty_array = empty_array

    def forward(self, inputs: Arrays) -> Arrays:
        self.xp = backend.get_array_module(inputs[0])
        return inputs[1:] or (self._empty_array,)

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        if len(self.inputs) == 2 and grad_outputs[0] is None:
            # Backward starts here without a gradient, as at delegate variables, and has
            # to visit both inputs.
            grad_outputs = (zeros_for_input(self, 1),)
        of_delegate = zeros_for_input(self, 0)
        zeros = keep_control_dependencies(grad_outputs, (of_delegate,))
        gradients = zeros + grad_outputs
        return tuple(gradients[index] for index in indexes)
