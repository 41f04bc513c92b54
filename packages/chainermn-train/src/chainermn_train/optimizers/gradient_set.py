"""Gradients outside of parameters, to be sent to other ranks or to be saved."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np
from chainer.backend import get_array_module

from ..optimizer_state import saved_value
from .parameter_set import ParameterSet


@dataclass(eq=False)
class Gradient:
    """A gradient that looks like a parameter to a communicator."""

    name: str  # of the parameter
    param: Any  # whose gradient it is
    grad: Any = None  # an array; None if there is no gradient

    @property
    def data(self) -> Any:
        """An array of the gradient's shape and dtype; None if the parameter is uninitialised."""
        return self.param.array


@dataclass(eq=False)
class GradientSet:
    """Gradients of certain parameters, with one loss scale.

    To a communicator the set looks like a model.

    A set belongs to parameter objects. If a model's parameters are replaced by other
    objects, the set can't be used any more.

    Attributes:
        gradients: one gradient for each parameter, in an order equal on all ranks.
        scale: the loss scale by which gradients are multiplied, or None.
    """

    gradients: list[Gradient]
    scale: float | None

    @classmethod
    def empty(cls, params: ParameterSet, scale: float | None) -> GradientSet:
        """Return a set in which each parameter has no gradient yet."""
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
        """Return the gradients of parameters, whose ``grad`` becomes None.

        A gradient that somebody else refers to (a view, another parameter, the user)
        is copied, since it might be written to while the set is on its way.
        """
        detached = cls.empty(params, scale)
        for each in detached.gradients:
            each.grad = present_gradient(each.param)
            each.param.cleargrad()
            if each.grad is None:
                continue
            # One reference is the attribute, the second is the function's argument.
            is_shared = sys.getrefcount(each.grad) > 2
            if is_shared or not each.grad.flags.owndata:
                each.grad = _copy_of(each.param, each.grad)
        return detached

    def give_copies(self) -> None:
        """Give the parameters copies of these gradients, for extensions that look at them."""
        for each in self.gradients:
            if each.grad is not None:
                each.param.grad = _copy_of(each.param, each.grad)

    def assign(self) -> None:
        """Give these gradients to the parameters."""
        for each in self.gradients:
            each.param.cleargrad()
            if each.grad is not None:
                each.param.grad = each.grad
        set_scale([each.param for each in self.gradients], self.scale)

    def save(self, serializer: Any) -> None:
        """Save the gradients and their loss scale."""
        arrays = serializer["arrays"]
        for each in self.gradients:
            if each.grad is not None:
                arrays(each.name.lstrip("/"), each.grad)
        if self.scale is not None:
            serializer("scale", self.scale)

    @classmethod
    def load(cls, serializer: Any, target: Any) -> GradientSet:
        """Return saved gradients, for a model's parameters by their names."""
        scale = saved_value(serializer, "scale")
        if scale is not None:
            scale = float(scale)
        loaded = cls.empty(ParameterSet(target), scale)
        arrays = serializer["arrays"]
        for each in loaded.gradients:
            grad = saved_value(arrays, each.name.lstrip("/"))
            if grad is not None:
                each.grad = each.param.device.send(grad)
        return loaded


def present_gradient(param: Any) -> Any:
    """Return a parameter's gradient; None if it has none."""
    return param.grad if param.is_initialized else None


def form_of(array: Any) -> tuple[type, Any, tuple[int, ...]]:
    """Return the type, dtype and shape that a gradient must share with its parameter."""
    return type(array), array.dtype, array.shape


def is_updated(param: Any) -> bool:
    """Return whether steps change a parameter: see :meth:`chainer.Link.disable_update`.

    A parameter without an update rule counts: an optimizer of the user's needs no rules.
    """
    return bool(getattr(param.update_rule, "enabled", True))


def drop_unused(params: ParameterSet) -> None:
    """Drop gradients along which nobody steps; they are neither sent nor kept."""
    for param in params.params:
        if not is_updated(param):
            param.cleargrad()


def zero_gradients(params: ParameterSet) -> None:
    """Let present gradients be zeros; clear that of a parameter without values."""
    for param in params.params:
        if present_gradient(param) is None:
            param.cleargrad()
        else:
            param.grad = param.device.xp.zeros_like(param.array)


def rescale(params: ParameterSet, scale: float | None) -> None:
    """Multiply all present gradients so that they have this loss scale.

    Gradients have another scale if the user's own code has called backward. Chainer
    notes the scale in each parameter that backward reaches.
    """
    for param in params.params:
        if param._loss_scale != scale:
            if present_gradient(param) is not None:
                multiply_gradients([param], (scale or 1) / (param._loss_scale or 1))
            param._loss_scale = scale


def set_scale(params: Iterable[Any], scale: float | None) -> None:
    """Note the loss scale in each parameter that has a gradient, so that the step divides by it.

    Chainer notes nothing if backward reached a parameter on other ranks only. A parameter
    without a gradient has no scale, as in one process.
    """
    for param in params:
        param._loss_scale = None if present_gradient(param) is None else scale


def multiply_gradients(params: Iterable[Any], factor: float) -> None:
    """Multiply the gradients of these parameters, or of these :class:`Gradient` objects.

    A small factor would be zero in float16, so products are taken in float32 or wider.
    """
    for each in params:
        if each.grad is not None:
            dtype = each.grad.dtype
            wide = np.result_type(dtype, np.float32)
            product = each.grad.astype(wide, copy=False) * wide.type(factor)
            # An operation on a 0-d array gives a scalar.
            each.grad = get_array_module(each.grad).asarray(product, dtype)


def _copy_of(param: Any, array: Any) -> Any:
    """Return a contiguous copy on the parameter's device."""
    with chainer.using_device(param.device):
        return param.device.xp.array(array, order="C")
