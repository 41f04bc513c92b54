"""Backward that reports each parameter's gradient as soon as it is final.

This file relies on the insides of Chainer 7's backward. Backward keeps a ``GradTable``,
which has a list of gradients for each variable. Each function that runs appends to the
lists of its inputs. At the end backward gives the sums of the lists to the parameters.
A function hook is not given the table, but finds it in the caller's local variable
``grads``. The parameter may still get another gradient than the one that was reported,
so the receiver of a report has to compare them after backward.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import chainer
from chainer.functions.connection.convolution_2d import Convolution2DFunction
from chainer.functions.connection.linear import LinearFunction

from ..gradient_set import form_of

# Called with a parameter's index in the list and its final gradient.
OnFinal = Callable[[int, Any], None]
# Functions of data, weights and bias that compute each gradient by itself.
_LAYERS = (LinearFunction, Convolution2DFunction)


def backward(
    loss: Any, params: list[Any], on_final: OnFinal, loss_scale: float | None
) -> None:
    """Do what ``loss.backward(loss_scale=loss_scale)`` does, and report final gradients.

    A gradient is final when every function that uses the parameter has run. If one of
    these functions doesn't run, or the gradient's type, dtype or shape isn't the
    parameter's, the gradient isn't reported. ``on_final`` is called in this thread,
    before the parameter has the gradient. On a GPU, kernels that compute the gradient
    are enqueued by then.
    """
    with _Tracker(loss, params, on_final):
        loss.backward(loss_scale=loss_scale)


class _Tracker(chainer.FunctionHook):
    """Counts for each parameter the functions that use it and whose backward has not run."""

    name = "ChainerMN's final gradients"  # no other hook may have this name

    def __init__(self, loss: Any, params: list[Any], on_final: OnFinal) -> None:
        self._params = params
        self._on_final = on_final
        numbers = {param.node: number for number, param in enumerate(params)}
        self._used = _used_by_function(loss, numbers)
        # How many functions use a parameter and have not run, by its number.
        self._num_left = Counter(it for used in self._used.values() for it in used)
        self._layer: Any = None  # whose `backward` is replaced while it runs
        self._table: dict[Any, list[Any]] = {}  # gradients by node, as the layer runs

    def backward_preprocess(self, function: Any, _: Any, __: Any) -> None:
        if type(function) in _LAYERS and function in self._used:
            self._layer = function
            self._table = sys._getframe(1).f_locals["grads"].grads
            function.backward = partial(self._weights_first, function)

    def deleted(self, function: Any = None) -> None:
        """Give a layer that has run, or failed, its own ``backward`` again."""
        if self._layer is not None:
            del self._layer.backward
            self._layer = None

    def backward_postprocess(self, function: Any, _: Any, __: Any) -> None:
        self.deleted()
        used = self._used.get(function)
        if not used:  # the function may belong to an inner backward
            return
        table = sys._getframe(1).f_locals["grads"].grads
        for number, node in used.items():
            self._num_left[number] -= 1
            grads = table.get(node, [])
            if self._num_left[number] == 0 and len(grads) == 1:
                self._report(number, grads[0].array)

    def _weights_first(
        self, layer: Any, indexes: tuple[int, ...], grad_outputs: Any
    ) -> Any:
        """Return a layer's gradients; weights' gradients leave while the data's is computed."""
        compute = partial(type(layer).backward, layer)
        weights = indexes[1:]
        if indexes[0] != 0 or not weights:
            return compute(indexes, grad_outputs)
        grads = compute(weights, grad_outputs)
        for number, node in self._used[layer].items():
            index = layer.inputs.index(node)
            is_last = self._num_left[number] == 1 and not self._table.get(node)
            if is_last and index in weights:
                self._num_left[number] = 0
                self._report(number, grads[weights.index(index)].array)
        return [*compute(indexes[:1], grad_outputs), *grads]

    def _report(self, number: int, grad: Any) -> None:
        if form_of(grad) == form_of(self._params[number].array):
            self._on_final(number, grad)


def _used_by_function(loss: Any, numbers: dict[Any, int]) -> dict[Any, dict[int, Any]]:
    """Return, for each function that leads to the loss, the nodes of parameters that it uses.

    The values map a parameter's number to its node, and ``numbers`` maps its node to its
    number.
    """
    used: dict[Any, dict[int, Any]] = {}
    todo = [loss.creator_node]
    while todo:
        function = todo.pop()
        if function is None or function in used:
            continue
        own = used[function] = {}
        for node in function.inputs:
            todo.append(node.creator_node)
            if node in numbers:
                own[numbers[node]] = node
    return used
