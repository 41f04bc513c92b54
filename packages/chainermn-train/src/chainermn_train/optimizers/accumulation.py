"""The gradients of several updates of one rank, added up for one step (``accumulate_steps``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import chainer
import numpy as np
from chainer.backend import get_array_module, get_device_from_array
from chainer.serializers import DictionarySerializer, NpzDeserializer

from ..optimizer_state import load_arrays, save_arrays
from .gradient_set import GradientSet, present_gradient
from .parameter_set import ParameterSet


class Accumulation:
    """This rank's sums of gradients since the last step; loss scales are divided out.

    Attributes:
        steps: number of updates that make a step.
        sums: the sums, in float32 or wider; None before the first update has ended.
        num_calls: updates since the last step, also those that failed.
        num_accumulated: those of them whose gradients are in the sums.
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
        """Whether the next update is neither the first one since the last step nor the last."""
        return 0 < self.num_calls < self.steps - 1

    @property
    def is_last(self) -> bool:
        """Whether the next update makes a step."""
        return self.num_calls == self.steps - 1

    def add(self, params: ParameterSet) -> None:
        """Count an update, and add its gradients."""
        self.num_calls += 1
        if self.sums is None:
            self.sums = GradientSet.empty(params, None)
        for each in self.sums.gradients:
            term = _unscaled(each.param)
            if term is None:
                continue
            if each.grad is None:
                each.grad = term.copy()
            else:
                each.grad = _beside(each.grad, term)
                each.grad += term
        self.num_accumulated += 1

    def assign_mean(
        self, params: ParameterSet, scale: float | None, and_present: bool
    ) -> None:
        """Make the sums, divided by the number of updates, the parameters' gradients.

        The present gradients are the last terms, if ``and_present``. The mean has this
        loss scale. The sums stay as they are.
        """
        sums = self.sums or GradientSet.empty(params, None)
        for each in sums.gradients:
            param = each.param
            total = each.grad
            term = None
            if and_present:
                term = _unscaled(param)
            if total is None:
                total = term
            elif term is not None:
                total = _beside(total, term) + term
            param._loss_scale = scale
            if total is None or param.array is None:
                param.cleargrad()
                continue
            # Where the mean becomes infinite, in float16 say, the step is skipped.
            with np.errstate(over="ignore"):
                mean = total / self.steps
                if scale is not None:
                    mean = mean * scale
                # An operation on a 0-d array gives a scalar.
                mean = get_array_module(param.array, total).asarray(mean)
                param.grad = param.device.send(mean).astype(param.dtype, copy=False)

    def serialize(self, serializer: Any, target: Any, rank: int, size: int) -> None:
        """Save or load the sums; ValueError if they are too many, another rank's or job's."""
        num_calls = int(serializer("calls", self.num_calls))
        saved_rank = int(serializer("rank", rank))
        saved_size = int(serializer("size", size))
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
        self.num_calls = num_calls
        if isinstance(serializer, chainer.Deserializer):
            self.num_accumulated = int(serializer("terms", 0))
            self.sums = None
            if self.num_accumulated:
                self.sums = GradientSet.load(serializer["sums"], target)
        elif self.sums is not None and self.sums.is_of(target):
            serializer("terms", self.num_accumulated)
            self.sums.save(serializer["sums"])
        else:
            serializer("terms", 0)


def accumulation_of_rank(
    path: str, states: Sequence[Mapping[str, Any]], rank: int, size: int
) -> dict[str, Any]:
    """Return the state of one of ``size`` ranks, of accumulations that other ranks had saved.

    ``states`` are of Chainer's serializers, and have accumulations at ``path``. Rank 0
    has all gradients, which count as if each earlier update had had as many terms as
    later ones, one of each rank: its examples are those of all ranks, whatever their
    number.
    """
    saved = [NpzDeserializer(state, path) for state in states]
    terms = [int(each("terms", None)) for each in saved]
    before = sum(terms)
    num_accumulated = 0
    sums: dict[str, Any] = {}
    if rank == 0 and before > 0:
        num_accumulated = max(1, round(before * size / len(states)))
        weight = num_accumulated / before
        for each, count in zip(saved, terms, strict=True):
            if count:
                _add_weighted(sums, load_arrays(each["sums"])[0], weight)
    serializer = DictionarySerializer({}, path)
    serializer("calls", saved[0]("calls", None))
    serializer("rank", rank)
    serializer("size", size)
    serializer("terms", num_accumulated)
    save_arrays(serializer["sums"], sums)
    return dict(serializer.target)


def _add_weighted(
    sums: dict[str, Any], arrays: Mapping[str, Any], weight: float
) -> None:
    for name, array in arrays.items():
        if array is None:
            continue
        term = array * weight
        if name in sums:
            term = sums[name] + term
        sums[name] = term


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


def _beside(array: Any, other: Any) -> Any:
    """Return an array on the device of another one: what a snapshot held is on the host."""
    if type(array) is type(other):
        return array
    return get_device_from_array(other).send(array)
