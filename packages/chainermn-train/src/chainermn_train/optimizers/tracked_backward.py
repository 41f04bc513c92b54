"""Backward that reports each parameter's gradient as soon as it is final.

This is the only file that relies on the insides of Chainer 7: that backward keeps
gradients in a ``GradTable``, whose lists grow with each function that runs, and takes
them out of it at the end. A function hook is not given that table, but called by the
function that has it as its local variable ``grads``. A caller that is given a gradient
has to check whether the parameter gets that one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import chainer
import numpy as np
from chainer.backends import cuda
from chainer.functions.connection.convolution_2d import Convolution2DFunction
from chainer.functions.connection.linear import LinearFunction

# Takes a parameter's number in the list, and its gradient, which is final.
OnFinal = Callable[[int, Any], None]

# Their inputs are data, weights and bias; each gradient is computed by itself.
_LAYERS = (LinearFunction, Convolution2DFunction)


def backward(
    loss: Any, params: list[Any], on_final: OnFinal, loss_scale: float | None
) -> None:
    """Do what ``loss.backward(loss_scale=loss_scale)`` does, and report final gradients.

    A gradient is final when every function that uses the parameter has run. It isn't
    reported where only some have run, or where it is an array neither of NumPy nor of
    CuPy. ``on_final`` is called in this thread, before the parameter has the gradient;
    on a GPU, once its kernels are enqueued.
    """
    tracker = _Tracker(loss, params, on_final)
    try:
        with tracker:
            loss.backward(loss_scale=loss_scale)
    finally:
        tracker.restore()


class _Tracker(chainer.FunctionHook):
    """Counts for each parameter the functions that use it and have not run."""

    def __init__(self, loss: Any, params: list[Any], on_final: OnFinal) -> None:
        # No two hooks may have the same.
        self.name = f"{type(self).__qualname__} {id(self)}"
        # By node, its gradients so far; known once the first function is about to run.
        self._grads: dict[Any, list[Any]] = {}
        self._on_final = on_final
        self._numbers = {id(param.node): number for number, param in enumerate(params)}
        # By node, the functions that have not run; and all functions.
        self._left, self._functions = _count_uses(loss, self._numbers)
        self._changed: Any = None  # the function whose `backward` was replaced

    def restore(self) -> None:
        """Give a function that has run, or failed, its own ``backward`` again."""
        if self._changed is not None:
            vars(self._changed).pop("backward", None)
            self._changed = None

    def backward_preprocess(self, function: Any, _: Any, __: Any) -> None:
        inputs = function.inputs
        if id(function) not in self._functions:  # of a backward within this one
            return
        if not self._grads:
            self._grads = sys._getframe(1).f_locals["grads"].grads
        if type(function) in _LAYERS and len(_distinct(inputs)) == len(inputs):
            # A weight's gradient can leave before that of the data has been computed.
            function.backward = partial(self._weights_first, function)
            self._changed = function

    def backward_postprocess(self, function: Any, _: Any, __: Any) -> None:
        if id(function) not in self._functions:
            return
        self.restore()
        for node in _distinct(function.inputs):
            left = self._left.get(id(node))
            if left is not None:
                self._left[id(node)] = left - 1
                grads = self._grads.get(node) if left == 1 else None
                if grads is not None and len(grads) == 1:
                    self._report(node, grads[0])

    def _weights_first(
        self, function: Any, indexes: tuple[int, ...], grad_outputs: Any
    ) -> Any:
        compute = partial(type(function).backward, function)
        weights = indexes[1:]
        if not weights or indexes[0] != 0:
            return compute(indexes, grad_outputs)
        grads = compute(weights, grad_outputs)
        for index, grad in zip(weights, grads, strict=True):
            node = function.inputs[index]
            is_last = self._left.get(id(node)) == 1 and not self._grads.get(node)
            if is_last and grad is not None:
                self._report(node, grad)
                del self._left[id(node)]
        return [*compute(indexes[:1], grad_outputs), *grads]

    def _report(self, node: Any, grad: Any) -> None:
        if type(grad.array) in (np.ndarray, cuda.ndarray):
            self._on_final(self._numbers[id(node)], grad.array)


def _count_uses(loss: Any, numbers: dict[int, int]) -> tuple[Counter[int], set[int]]:
    """Return how many functions use each parameter's node, and those that lead to the loss."""
    uses: Counter[int] = Counter()
    todo = [loss.creator_node]
    seen = {id(loss.creator_node)}
    for function in todo:  # which grows
        if function is None:
            continue
        for node in _distinct(function.inputs):
            if id(node) in numbers:
                uses[id(node)] += 1
            creator = node.creator_node
            if creator is not None and id(creator) not in seen:
                seen.add(id(creator))
                todo.append(creator)
    return uses, seen


def _distinct(nodes: Iterable[Any]) -> Collection[Any]:
    """Return nodes, which have an equality of their own, each once."""
    return {id(node): node for node in nodes}.values()
