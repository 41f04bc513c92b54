"""Gradients detached from a model: to be sent while the model computes new ones."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import chainer

from .parameter_set import ParameterSet
from .stored_arrays import StoredArray, serialize_arrays


@dataclass(eq=False)
class DetachedGradient:
    """A gradient with the attributes that a communicator expects of a parameter."""

    name: str
    param: Any  # whose gradient it is
    grad: Any  # an array without another owner; None if there is no gradient
    scale: float | None  # the loss scale that the gradient was computed with, if there was one

    @property
    def data(self) -> Any:
        """The parameter's array, of the gradient's shape and dtype; None if uninitialised."""
        return self.param.array


class DetachedGradients:
    """The gradients of parameters; a model for a communicator."""

    def __init__(self, entries: list[DetachedGradient]) -> None:
        self.entries = entries

    def namedparams(self) -> list[tuple[str, DetachedGradient]]:
        return [(each.name, each) for each in self.entries]

    @classmethod
    def detach_from(cls, params: ParameterSet) -> DetachedGradients:
        """Move the gradients out of parameters, whose gradients are None then.

        Arrays with other owners (parameters, views, the user) or read-only ones are copied, not
        moved: somebody might write into them meanwhile.
        """
        entries = []
        for name, param in params.namedparams():
            grad = param.grad if param.is_initialized else None
            param.cleargrad()
            # One reference is `grad`, one may be the function's argument.
            if grad is not None and (sys.getrefcount(grad) > 2 or not _owns_memory(grad)):
                grad = copy_of(param, grad)
            entries.append(DetachedGradient(name, param, grad, param._loss_scale))
            del grad
        return cls(entries)

    def assign(self) -> None:
        """Make these the parameters' gradients, with their loss scales; None where one is gone."""
        for each in self.entries:
            param, grad = each.param, each.grad
            if param.array is None or grad is None or not _is_like(grad, param.array):
                param.cleargrad()
            else:
                param.grad = param.device.send(grad)
            param._loss_scale = each.scale

    def discard(self, params: list[Any]) -> None:
        """Drop the gradients of these parameters."""
        ids = set(map(id, params))
        for each in self.entries:
            if id(each.param) in ids:
                each.grad = None

    def save(self, serializer: Any) -> None:
        """Save these."""
        rows = [StoredArray(each.name, each.scale, each.grad) for each in self.entries]
        serialize_arrays(serializer, rows)

    @classmethod
    def load(cls, serializer: Any, target: Any) -> DetachedGradients:
        """Return those that were saved, of a model's parameters that have their names."""
        params = dict(target.namedparams())
        return cls(
            [
                DetachedGradient(row.name, params[row.name], row.array, row.scale)
                for row in serialize_arrays(serializer, [])
                if row.name in params
            ]
        )


def copy_of(param: Any, array: Any) -> Any:
    """Return a contiguous copy on the parameter's device."""
    with chainer.using_device(param.device):
        return param.device.xp.array(array, order="C")


def multiply_gradients(params: list[Any], factor: float) -> None:
    """Multiply the gradients of parameters, or detached ones."""
    for each in params:
        if each.grad is not None:
            each.grad = each.grad * each.grad.dtype.type(factor)


def _owns_memory(array: Any) -> bool:
    flags = array.flags
    # CuPy's arrays are always writeable, and have no such flag.
    return bool(flags.owndata and flags.c_contiguous and getattr(flags, "writeable", True))


def _is_like(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype)
