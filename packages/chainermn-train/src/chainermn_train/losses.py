"""What Chainer's update does before it steps: computes gradients, which other ranks may lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compute_gradients(optimizer: Any, lossfun: Callable[..., Any], args: Any, kwds: Any) -> None:
    """What :meth:`chainer.GradientMethod.update` does before it steps."""
    loss = lossfun(*args, **kwds)
    if getattr(optimizer, "_use_cleargrads", True):
        optimizer.target.cleargrads()
    else:
        optimizer.target.zerograds()
    loss.backward(loss_scale=optimizer._loss_scale)


def scale_missing_gradients(optimizer: Any) -> None:
    """Make the step undo the loss scale also where backward met no gradient here.

    Chainer notes the scale in each parameter that backward meets. One that it met on
    other ranks only would get their scaled mean, and keep the scale in it.
    """
    scale = optimizer._loss_scale
    if scale is not None:
        for param in optimizer.target.params():
            if param.grad is None:
                param._loss_scale = scale
