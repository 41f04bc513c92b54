"""Gradients of a model's parameters: added up, handed in, in flight, and in a snapshot."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np
from chainer.backend import get_array_module, get_device_from_array
from chainer.serializers import DictionarySerializer, NpzDeserializer

from ..optimizer_state import load_arrays, save_arrays
from .parameter_set import ParameterSet


@dataclass(eq=False)
class Gradient:
    """A gradient with the attributes that a communicator expects of a parameter."""

    name: str  # of the parameter
    param: Any  # whose gradient it is
    grad: Any = None  # an array; None if there is no gradient
    like: Any = None  # where shape and dtype were planned: an array that has them

    @property
    def data(self) -> Any:
        """An array of the gradient's shape and dtype; None if the parameter is uninitialised."""
        return self.param.array if self.like is None else self.like


class GradientSet:
    """Gradients of parameters, the objects, with one loss scale; a model for a communicator.

    The set of parameters never changes: where a model's does, its gradients are
    dropped.

    Attributes:
        gradients: one for each parameter, in an order that is equal on all ranks.
        scale: the loss scale that all are multiplied by; None for none.
    """

    def __init__(self, gradients: Iterable[Gradient], scale: float | None) -> None:
        self.gradients, self.scale = list(gradients), scale

    @classmethod
    def empty(cls, params: ParameterSet, scale: float | None) -> GradientSet:
        """Return a place for a gradient of each parameter."""
        return cls([Gradient(*each) for each in params.namedparams()], scale)

    def namedparams(self) -> list[tuple[str, Gradient]]:
        return [(each.name, each) for each in self.gradients]

    def is_of(self, target: Any) -> bool:
        """Return whether these are the gradients of a model's present parameters."""
        return {id(each.param) for each in self.gradients} == set(
            map(id, target.params())
        )

    @classmethod
    def detach_from(cls, params: ParameterSet, scale: float | None) -> GradientSet:
        """Move the gradients out of parameters, whose gradients are None then.

        Arrays with other owners (parameters, views, the user) or read-only ones are
        copied, not moved: somebody might write into them meanwhile.
        """
        detached = cls.empty(params, scale)
        # One reference is `grad`; before Python 3.14 the function's argument is
        # another.
        sole = 1 if sys.version_info >= (3, 14) else 2
        for each in detached.gradients:
            grad = present_gradient(each.param)
            each.param.cleargrad()
            if grad is not None and (
                sys.getrefcount(grad) > sole or not _owns_memory(grad)
            ):
                grad = _copy_of(each.param, grad)
            each.grad = grad
        return detached

    def give_copies(self) -> None:
        """Give the parameters copies of these, for what looks at them."""
        for each in self.gradients:
            if each.grad is not None:
                each.param.grad = _copy_of(each.param, each.grad)

    def assign(self) -> None:
        """Make these the parameters' gradients; None where there is none, or it doesn't fit."""
        for each in self.gradients:
            param, grad = each.param, each.grad
            if (
                grad is None
                or param.array is None
                or not has_form_of(grad, param.array)
            ):
                param.cleargrad()
                param._loss_scale = None
            else:
                param.grad = param.device.send(grad)
                param._loss_scale = self.scale

    def rescale(self, scale: float | None) -> None:
        """Let these be as if they had been computed with this loss scale."""
        if self.scale != scale:
            multiply_gradients(self.gradients, (scale or 1) / (self.scale or 1))
            self.scale = scale

    def save(self, serializer: Any) -> None:
        """Save these."""
        save_arrays(
            serializer, {each.name: each.grad for each in self.gradients}, self.scale
        )

    @classmethod
    def load(cls, serializer: Any, target: Any) -> GradientSet:
        """Return those that were saved, of a model's parameters that have their names."""
        arrays, scale = load_arrays(serializer)
        # Of several paths to a parameter any may have been taken.
        named = target.namedparams()
        by_id = {id(param): arrays[name] for name, param in named if name in arrays}
        loaded = cls.empty(ParameterSet(target), scale)
        for each in loaded.gradients:
            each.grad = by_id.get(id(each.param))
        return loaded


class GradientGroup:
    """The gradients of this rank's present group of updates, which make one step together."""

    def __init__(self, steps: int) -> None:
        self.steps = steps  # number of updates in a group
        self.clear()

    def clear(self) -> None:
        """End the group."""
        self.sums: GradientSet | None = None
        self.num_calls = 0  # updates of the present group so far, including failed ones
        self.num_accumulated = 0  # those of them whose gradients are in the sums

    @property
    def is_between(self) -> bool:
        """Whether the next update is neither the first of a group nor its last."""
        return 0 < self.num_calls < self.steps - 1

    @property
    def is_last(self) -> bool:
        """Whether the next update completes a group."""
        return self.num_calls == self.steps - 1

    def scale(self, now: float | None) -> float | None:
        """Return the loss scale of the group: that which was set at its first update."""
        return now if self.sums is None else self.sums.scale

    def add(self, params: ParameterSet, scale: float | None) -> bool:
        """Count an update, and add its gradients in float32 or wider; return False: no step yet."""
        self.num_calls += 1
        if self.sums is None:
            self.sums = GradientSet.empty(params, scale)
        rescale(params, self.sums.scale)
        for each in self.sums.gradients:
            grad = present_gradient(each.param)
            if grad is not None and each.grad is None:
                each.grad = grad.astype(np.result_type(grad.dtype, np.float32))
            elif grad is not None:
                each.grad = _beside(each.grad, grad)
                each.grad += grad
        self.num_accumulated += 1
        return False

    def assign_mean(
        self, params: ParameterSet, scale: float | None, and_present: bool
    ) -> None:
        """Make the sums, divided by the group's number of updates, the parameters' gradients.

        The present gradients are the last terms, if ``and_present``. The group stays as
        it is.
        """
        sums = self.sums or GradientSet.empty(params, scale)
        rescale(params, sums.scale)
        for each in sums.gradients:
            param, total = each.param, each.grad
            grad = present_gradient(param) if and_present else None
            if grad is not None:
                total = grad if total is None else _beside(total, grad) + grad
            if total is None or param.array is None:
                param.cleargrad()
                continue
            # An operation on a 0-d array gives a scalar.
            mean = get_array_module(param.array, total).asarray(total / self.steps)
            # As infinite in float16, the step is skipped.
            with np.errstate(over="ignore"):
                param.grad = param.device.send(mean).astype(param.dtype, copy=False)

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
        if isinstance(serializer, chainer.Deserializer):
            self.num_accumulated = int(serializer("terms", 0))
            sums = GradientSet.load(serializer["sums"], target)
            self.sums = sums if self.num_accumulated else None
            return
        own = self.sums if self.sums is not None and self.sums.is_of(target) else None
        serializer("terms", 0 if own is None else self.num_accumulated)
        (own or GradientSet([], None)).save(serializer["sums"])


def group_of_rank(
    path: str, states: Sequence[Mapping[str, Any]], rank: int, size: int
) -> dict[str, Any]:
    """Return a group's state for one of ``size`` ranks, of those that other ranks had saved.

    ``states`` are of Chainer's serializers, and have groups at ``path``. Rank 0 has all
    gradients, which count as if each earlier update had had as many terms as later
    ones, one of each rank: its examples are those of all ranks, whatever their number.
    """
    saved = [NpzDeserializer(state, path) for state in states]
    loaded = [load_arrays(each["sums"]) for each in saved]
    scale = next((scale for arrays, scale in loaded if arrays), None)
    sums: dict[str, Any] = {}
    before = sum(int(each("terms", None)) for each in saved)
    terms = max(before > 0, round(before * size / len(states)))
    weight = terms / max(1, before)
    for arrays, own in loaded if rank == 0 else ():
        for name, array in arrays.items():
            if array is not None:
                scaled = array * (weight * (scale or 1) / (own or 1))
                sums[name] = sums[name] + scaled if name in sums else scaled
    serializer = DictionarySerializer({}, path)
    serializer("calls", saved[0]("calls", None))
    serializer("rank", rank)
    serializer("size", size)
    serializer("terms", 0 if rank else terms)
    save_arrays(serializer["sums"], sums, scale)
    return dict(serializer.target)


def present_gradient(param: Any) -> Any:
    """Return a parameter's gradient; None if it has none."""
    return param.grad if param.is_initialized else None


def not_updated(params: ParameterSet) -> list[Any]:
    """Return the parameters that no step changes: see :meth:`chainer.Link.disable_update`."""
    return [
        it for it in params.params if getattr(it.update_rule, "enabled", True) is False
    ]


def rescale(params: ParameterSet, scale: float | None) -> None:
    """Let all present gradients be as if they had been computed with this loss scale.

    They were computed with others where the user's own code calls backward, or has
    changed the scale in the middle of a group. Chainer keeps the scale in each
    parameter that backward meets.
    """
    for param in params.params:
        if param._loss_scale != scale:
            if present_gradient(param) is not None:
                multiply_gradients([param], (scale or 1) / (param._loss_scale or 1))
            param._loss_scale = scale


def are_scaled_by(params: ParameterSet, scale: float | None) -> bool:
    """Return whether each parameter's last backward was with this loss scale, None for none."""
    return all([param._loss_scale == scale for param in params.params])


def set_scale(params: Iterable[Any], scale: float | None) -> None:
    """Let the step undo the loss scale wherever there is a gradient, and nowhere else.

    Backward may have met a parameter on other ranks only. Hooks treat one that no rank
    has a gradient of as one process does.
    """
    for param in params:
        param._loss_scale = None if present_gradient(param) is None else scale


def multiply_gradients(params: Iterable[Any], factor: float) -> None:
    """Multiply the gradients of parameters, or those of a set."""
    for each in params:
        if each.grad is not None:
            product = each.grad * each.grad.dtype.type(factor)
            each.grad = get_array_module(each.grad).asarray(product)


def has_form_of(one: Any, other: Any) -> bool:
    """Return whether two arrays have the same shape and dtype."""
    return bool(one.shape == other.shape and one.dtype == other.dtype)


def _beside(array: Any, other: Any) -> Any:
    """Return an array on the device of another one: what a snapshot held is on the host."""
    return (
        array
        if type(array) is type(other)
        else get_device_from_array(other).send(array)
    )


def _copy_of(param: Any, array: Any) -> Any:
    """Return a contiguous copy on the parameter's device."""
    with chainer.using_device(param.device):
        return param.device.xp.array(array, order="C")


def _owns_memory(array: Any) -> bool:
    flags = array.flags
    # CuPy's arrays are always writeable, and have no such flag.
    return bool(
        flags.owndata and flags.c_contiguous and getattr(flags, "writeable", True)
    )
