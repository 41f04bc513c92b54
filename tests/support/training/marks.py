"""A function that tells when backward comes to it: how tests follow or break a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer


class PlantedError(Exception):
    """What a backward raises."""


class Mark(chainer.FunctionNode):
    """The identity; its backward calls a function, which may raise."""

    def __init__(self, told: Callable[[], Any]) -> None:
        self.told = told

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, grad_outputs: Any) -> Any:
        self.told()
        return grad_outputs


def marked(x: Any, told: Callable[[], Any]) -> chainer.Variable:
    variable = x if isinstance(x, chainer.Variable) else chainer.Variable(x)
    return Mark(told).apply((variable,))[0]


def raise_planted() -> None:
    raise PlantedError
