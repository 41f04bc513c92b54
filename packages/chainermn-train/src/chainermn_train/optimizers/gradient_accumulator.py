"""Sums of the gradients of several updates, which are exchanged once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np

from .mixed_precision import scale_missing_gradients
from .parameter_set import ParameterSet
from .stored_arrays import StoredArray, serialize_arrays


@dataclass(eq=False)
class _Sum:
    param: Any
    total: Any  # an array of the parameter's shape, in float32 or wider
    scale: float | None  # the loss scale of the terms
    is_empty: bool = False

    def move_to_device_of(self, grad: Any) -> None:
        """Move the sum to another array's device: what a snapshot held is on the host."""
        if type(self.total) is not type(grad):
            self.total = chainer.backend.get_device_from_array(grad).send(self.total)


class GradientAccumulator:
    """The gradients of this rank's present group of updates, but for the group's last.

    An update's gradients are added up where they are, and stay the parameters' until the next one.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps  # number of updates in a group
        self._sums: list[_Sum] = []
        self.reset()

    def reset(self) -> None:
        """End the group; the arrays are kept for the next one."""
        for each in self._sums:
            each.is_empty = True
        self.num_calls = 0  # updates of the present group so far, including failed ones
        self.num_accumulated = 0  # those of them whose gradients are in the sums

    def add(self, params: ParameterSet) -> None:
        """Count an update and add its gradients."""
        self.num_calls += 1
        self.num_accumulated += 1
        by_id = self._by_id()
        for param in params.params:
            grad = param.grad if param.is_initialized else None
            if grad is None:
                continue
            found = by_id.get(id(param))
            if found is None:
                wide = np.result_type(grad.dtype, np.float32)
                self._sums.append(_Sum(param, grad.astype(wide), param._loss_scale))
                continue
            found.move_to_device_of(grad)
            if found.is_empty:
                found.total[...] = grad
                found.scale, found.is_empty = param._loss_scale, False
            else:
                found.total += _scaled(grad, param._loss_scale, found.scale)

    def update(
        self, optimizer: Any, params: ParameterSet, backward: Callable[[], None] | None
    ) -> None:
        """Make an update in the middle of the group, which doesn't communicate."""
        try:
            if backward is not None:
                backward()
            scale_missing_gradients(optimizer, params)
        except BaseException:
            self.num_calls += 1
            raise
        self.add(params)

    def complete(self, params: ParameterSet, num_updates: float, and_present: bool = True) -> None:
        """Make the group's gradients the parameters', divided by ``num_updates``.

        The present gradients are the last terms, if ``and_present``. The sums stay.
        """
        by_id = self._by_id()
        for param in params.params:
            found = by_id.get(id(param))
            total = param.grad if and_present and param.is_initialized else None
            if found is not None and not found.is_empty:
                if total is not None:
                    found.move_to_device_of(total)
                    total = found.total + _scaled(total, param._loss_scale, found.scale)
                else:
                    total = found.total
                param._loss_scale = found.scale
            if total is None or param.array is None:
                param.cleargrad()
                continue
            total = total / num_updates
            with np.errstate(over="ignore"):  # as infinite in float16, the step is skipped
                param.grad = param.device.send(total).astype(param.dtype, copy=False)

    def discard(self, params: list[Any]) -> None:
        """Drop the sums of these parameters."""
        ids = set(map(id, params))
        self._sums = [each for each in self._sums if id(each.param) not in ids]

    def serialize(self, serializer: Any, target: Any, rank: int, size: int) -> None:
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
        sums = {id(each.param): each for each in self._sums if not each.is_empty}
        rows = []
        for name, param in target.namedparams():
            if (found := sums.pop(id(param), None)) is not None:
                rows.append(StoredArray(name, found.scale, found.total))
        rows = serialize_arrays(serializer["sums"], rows)
        if isinstance(serializer, chainer.Deserializer):
            params = dict(target.namedparams())
            rows = [row for row in rows if row.name in params and row.array is not None]
            self._sums = [_Sum(params[row.name], row.array, row.scale) for row in rows]

    def _by_id(self) -> dict[int, _Sum]:
        return {id(each.param): each for each in self._sums}


def _scaled(grad: Any, scale: float | None, wanted: float | None) -> Any:
    """Return a gradient as if it had been computed with the ``wanted`` loss scale."""
    # They differ where the user changed it in the middle of a group.
    return grad if scale == wanted else grad * ((wanted or 1) / (scale or 1))
