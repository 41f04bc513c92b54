"""Adds up the gradients of several updates, to exchange them once."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from .held import Held, HeldGradients


class Accumulation:
    """The gradients of the group of updates that is under way on this rank.

    Attributes:
        steps: updates in a group.
        calls: updates of the present group so far, the failed ones too.
        terms: those of them whose gradients are in the sums.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.calls = 0
        self.terms = 0
        self._sums = HeldGradients()

    @property
    def is_middle(self) -> bool:
        """Whether the next update is neither the first nor the last of its group."""
        return 0 < self.calls < self.steps - 1

    @property
    def is_last(self) -> bool:
        """Whether the next update is the last of its group."""
        return self.calls == self.steps - 1

    def add(self, gradients: HeldGradients) -> None:
        """Count an update, and add its gradients, which become this object's."""
        self.calls += 1
        self.terms += 1
        if self.steps == 1:
            self._sums = gradients
            return
        for name, held in gradients.items():
            _add(self._sums.setdefault(name, Held(held.data, None, held.scale)), held)

    def skip(self) -> None:
        """Count an update that failed."""
        self.calls += 1

    def pop(self, target: Any, terms_per_rank: float) -> HeldGradients:
        """The sums divided by how many gradients they hold; this ends the group.

        Args:
            target: the link whose gradients they are.
            terms_per_rank: the mean of ``terms`` over ranks, so that the mean over ranks of what is
                returned is the mean of all gradients that any rank has added.
        """
        sums = self._sums
        self.drop()
        gradients = HeldGradients()
        for name, param in target.namedparams():
            held = sums.pop(name, None) or Held(None, None, None)
            grad = held.grad
            if grad is not None and terms_per_rank != 1:
                grad /= terms_per_rank
            if grad is not None and param.array is not None:
                with np.errstate(over="ignore"):  # as infinite in float16, the step is skipped
                    grad = param.device.send(grad).astype(param.dtype, copy=False)
            gradients[name] = Held(param.array, grad, held.scale)
        return gradients

    def drop(self) -> None:
        """Forget the group's gradients, and end it."""
        self._sums = HeldGradients()
        self.calls = self.terms = 0

    def forget(self, names: set[str]) -> None:
        """Have no sum any more for these parameters."""
        self._sums.forget(names)

    def serialize(self, serializer: Any, rank: int, size: int) -> None:
        """Save or load the sums and how many updates they are of.

        Raises:
            ValueError: a group of these many updates has come to its end already, or the sums are
                another rank's, or of a job of another size.
        """
        calls = int(serializer("calls", self.calls))
        owner = int(serializer("rank", rank)), int(serializer("size", size))
        if calls and owner != (rank, size):
            raise ValueError(
                f"the snapshot holds gradients that rank {owner[0]} of {owner[1]} added up, and "
                f"this is rank {rank} of {size}: save after a step (see accumulate_steps and "
                "flush), or resume with the same ranks"
            )
        if calls >= self.steps:
            raise ValueError(
                f"the snapshot holds gradients of {calls} updates: use accumulate_steps as large "
                f"as when it was made, not {self.steps}"
            )
        self.calls = calls
        self.terms = int(serializer("terms", self.terms))
        self._sums = self._sums.serialize(serializer["sums"])


def _add(total: Held, held: Held) -> None:
    """Add a gradient that is the caller's to the sum, 16-bit floats in float32."""
    grad = held.grad
    if grad is None:
        return
    if grad.dtype.itemsize < np.dtype(np.float32).itemsize:
        grad = grad.astype(np.float32)
    if total.grad is None:
        total.grad, total.scale = grad, held.scale
        return
    if type(total.grad) is not type(grad):  # what a snapshot held is on the host
        total.grad = chainer.backend.get_device_from_array(grad).send(total.grad)
    if held.scale != total.scale:  # the user changed it in the middle of a group
        grad *= (total.scale or 1) / (held.scale or 1)
    total.grad += grad
