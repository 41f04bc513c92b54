"""Sums of the gradients of several updates, which are exchanged once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from .detached_gradients import DetachedGradient, DetachedGradients
from .mixed_precision import scale_missing_gradients


class GradientAccumulator:
    """The gradients of this rank's present group of updates."""

    def __init__(self, steps: int) -> None:
        self.steps = steps  # number of updates in a group
        self.reset()

    def reset(self) -> None:
        """End the group without its gradients."""
        self._sums = DetachedGradients()
        self.num_calls = 0  # updates of the present group so far, including failed ones
        self.num_accumulated = 0  # those of them whose gradients are in the sums

    @property
    def is_middle(self) -> bool:
        """Whether the next update is neither the first nor the last of its group."""
        return 0 < self.num_calls < self.steps - 1

    @property
    def is_last(self) -> bool:
        """Whether the next update is the last of its group."""
        return self.num_calls == self.steps - 1

    def add(self, gradients: DetachedGradients) -> None:
        """Count an update and add its gradients, whose arrays may be overwritten then."""
        self.num_calls += 1
        self.num_accumulated += 1
        if self.steps == 1:
            self._sums = gradients
            return
        for name, term in gradients.items():
            _add(self._sums.setdefault(name, DetachedGradient(term.data, None, term.scale)), term)

    def update(self, optimizer: Any, backward: Callable[[], None] | None) -> None:
        """Make an update in the middle of the group, which doesn't communicate."""
        try:
            if backward is not None:
                backward()
            scale_missing_gradients(optimizer)
        except BaseException:
            self.num_calls += 1
            raise
        self.add(DetachedGradients.detach_from(optimizer.target))

    def pop(self, target: Any, num_per_rank: float) -> DetachedGradients:
        """End the group; return the sums for ``target``, divided by ``num_per_rank``.

        That is the mean of ``num_accumulated`` over ranks: all gradients count the same then.
        """
        sums = self._sums
        self.reset()
        gradients = DetachedGradients()
        for name, param in target.namedparams():
            total = sums.pop(name, None) or DetachedGradient(None, None, None)
            grad = total.grad
            if grad is not None and num_per_rank != 1:
                grad /= num_per_rank
            if grad is not None and param.array is not None:
                with np.errstate(over="ignore"):  # as infinite in float16, the step is skipped
                    grad = param.device.send(grad).astype(param.dtype, copy=False)
            gradients[name] = DetachedGradient(param.array, grad, total.scale)
        return gradients

    def discard(self, names: set[str]) -> None:
        """Drop the sums of these parameters."""
        self._sums.discard(names)

    def serialize(self, serializer: Any, rank: int, size: int) -> None:
        """Save or load the sums; ValueError if they are too many, another rank's or job's."""
        num_calls = int(serializer("calls", self.num_calls))
        owner = int(serializer("rank", rank)), int(serializer("size", size))
        if num_calls and owner != (rank, size):
            raise ValueError(
                f"the snapshot holds gradients that rank {owner[0]} of {owner[1]} added up, and "
                f"this is rank {rank} of {size}: save after a step (see accumulate_steps and "
                "flush), or resume with the same ranks"
            )
        if num_calls >= self.steps:
            raise ValueError(
                f"the snapshot holds gradients of {num_calls} updates: use accumulate_steps as "
                f"large as when it was made, not {self.steps}"
            )
        self.num_calls = num_calls
        self.num_accumulated = int(serializer("terms", self.num_accumulated))
        self._sums = self._sums.serialize(serializer["sums"])


def _add(total: DetachedGradient, term: DetachedGradient) -> None:
    """Add a gradient, which may be overwritten, to the sum; 16-bit floats in float32."""
    grad = term.grad
    if grad is None:
        return
    if grad.dtype.itemsize < np.dtype(np.float32).itemsize:
        grad = grad.astype(np.float32)
    if total.grad is None:
        total.grad, total.scale = grad, term.scale
        return
    if type(total.grad) is not type(grad):  # what a snapshot held is on the host
        total.grad = chainer.backend.get_device_from_array(grad).send(total.grad)
    if term.scale != total.scale:  # the user changed it in the middle of a group
        grad *= (total.scale or 1) / (term.scale or 1)
    total.grad += grad
