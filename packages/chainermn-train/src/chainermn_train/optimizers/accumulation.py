"""The gradients of several updates of one rank, added up for one step (``accumulate_steps``)."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer.backend import get_array_module

from .gradient_set import GradientSet, present_gradient
from .parameter_set import ParameterSet


class Accumulation:
    """This rank's sums of gradients since the last step, without loss scales.

    Attributes:
        steps: number of updates that make a step.
        sums: the sums, in float32 or wider; None before the first update has ended.
        num_calls: updates since the last step, also those that failed.
        num_accumulated: how many of these updates' gradients are in the sums.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self.sums: GradientSet | None = None
        self.num_calls = 0
        self.num_accumulated = 0

    @property
    def is_between(self) -> bool:
        """Whether the next update is neither the first nor the last of a step."""
        return 0 < self.num_calls < self.steps - 1

    @property
    def is_last(self) -> bool:
        """Whether the next update makes a step."""
        return self.num_calls == self.steps - 1

    def add(self, params: ParameterSet, num_updates: int) -> None:
        """Add the present gradients, of ``num_updates`` updates (0 or 1)."""
        if self.sums is None:
            self.sums = GradientSet.empty(params, None)
        for each in self.sums.gradients:
            term = _unscaled(each.param)
            if term is None:
                continue
            if each.grad is None:
                each.grad = term.copy()
            else:
                each.grad += term
        self.num_accumulated += num_updates

    def assign_mean(
        self, params: ParameterSet, scale: float | None, and_present: bool
    ) -> None:
        """Give the parameters the sums divided by ``steps``, multiplied by the loss scale.

        With ``and_present`` the parameters' present gradients are added first. If fewer
        than ``steps`` updates were added up, the caller corrects the means over ranks
        by a factor. The sums themselves don't change.
        """
        sums = self.sums or GradientSet.empty(params, None)
        for each in sums.gradients:
            param = each.param
            terms = [each.grad]
            if and_present:
                terms.append(_unscaled(param))
            terms = [term for term in terms if term is not None]
            param._loss_scale = scale
            if not terms:
                param.cleargrad()
                continue
            # If a mean becomes infinite, as float16 may, the step is skipped.
            with np.errstate(over="ignore"):
                mean = sum(terms[1:], terms[0]) / self.steps
                if scale is not None:
                    mean = mean * scale
                # An operation on a 0-d array gives a scalar.
                mean = get_array_module(param.array).asarray(mean)
                param.grad = mean.astype(param.dtype, copy=False)

    def serialize(self, serializer: Any, target: Any, rank: int, size: int) -> None:
        """Save or load the sums; ValueError if they are too many, another rank's or job's."""
        if self.sums is not None and not self.sums.is_of(target):
            # A link was replaced. `num_calls` stays, since ranks communicate at the same
            # calls, and the links of other ranks may be as before.
            self.sums = None
            self.num_accumulated = 0
        own = np.array([self.num_calls, self.num_accumulated, rank, size])
        counts = serializer("counts", own)
        num_calls, num_accumulated, saved_rank, saved_size = counts.tolist()
        if num_calls and (saved_rank, saved_size) != (rank, size):
            raise ValueError(
                f"the snapshot holds gradients that rank {saved_rank} of {saved_size} added up, "
                f"and this is rank {rank} of {size}: save after a step (see accumulate_steps "
                "and flush), or resume with the same ranks"
            )
        if num_calls >= self.steps:
            raise ValueError(
                f"the snapshot holds gradients of {num_calls} updates: use accumulate_steps as "
                f"large as when it was made, not {self.steps}"
            )
        if isinstance(serializer, chainer.Deserializer):
            self.clear()
            self.num_calls = num_calls
            self.num_accumulated = num_accumulated
            if num_calls:
                self.sums = GradientSet.load(serializer["sums"], target)
        elif self.sums is not None:
            self.sums.save(serializer["sums"])


def _unscaled(param: Any) -> Any:
    """Return a parameter's gradient without its loss scale, in float32 or wider; or None."""
    grad = present_gradient(param)
    if grad is None:
        return None
    wide = grad.astype(np.result_type(grad.dtype, np.float32), copy=False)
    if param._loss_scale is None:
        return wide
    # An operation on a 0-d array gives a scalar.
    return get_array_module(wide).asarray(wide / param._loss_scale)
