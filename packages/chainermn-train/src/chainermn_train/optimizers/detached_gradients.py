"""Gradients detached from a model: to be added up, or sent while the model computes new ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np


@dataclass(eq=False)
class DetachedGradient:
    """A gradient with the attributes that a communicator expects of a parameter."""

    data: Any  # the parameter's array, of the gradient's shape and dtype; None if uninitialised
    grad: Any  # an array without another owner; None if there is no gradient
    scale: float | None  # the loss scale that the gradient was computed with, if there was one


class DetachedGradients(dict[str, DetachedGradient]):
    """Gradients by the names of their parameters; a model for a communicator."""

    def namedparams(self) -> Iterator[tuple[str, DetachedGradient]]:
        return iter(self.items())

    @classmethod
    def detach_from(cls, target: Any) -> DetachedGradients:
        """Move the gradients out of a link, whose gradients are None then.

        Arrays with other owners (parameters, views, the user) or read-only ones are copied, not
        moved: somebody might write into them meanwhile.
        """
        detached = cls()
        for name, param in target.namedparams():
            grad = param.grad if param.is_initialized else None
            param.cleargrad()
            # One reference is `grad`, one may be the function's argument.
            if grad is not None and (sys.getrefcount(grad) > 2 or not _owns_memory(grad)):
                with chainer.using_device(param.device):
                    grad = param.device.xp.array(grad, order="C")
            detached[name] = DetachedGradient(param.array, grad, param._loss_scale)
            del grad
        return detached

    def assign_to(self, target: Any) -> None:
        """Make these the gradients of a link, with their loss scales; None where none fits."""
        for name, param in target.namedparams():
            detached = self.get(name)
            grad = None if detached is None else detached.grad
            if param.array is None or grad is None or not _is_like(grad, param.array):
                param.cleargrad()
            else:
                param.grad = param.device.send(grad)
            if detached is not None:
                param._loss_scale = detached.scale

    def discard(self, names: set[str]) -> None:
        """Drop the gradients of these parameters."""
        for name in names & self.keys():
            self[name].grad = None

    def serialize(self, serializer: Any) -> DetachedGradients:
        """Save these, or load others; return those that were saved or loaded."""
        rows = [[name, each.scale, each.grad is not None] for name, each in self.items()]
        if not isinstance(serializer, chainer.serializer.Deserializer):
            serializer("names", np.frombuffer(json.dumps(rows).encode(), np.uint8))
            for number, each in enumerate(self.values()):
                if each.grad is not None:
                    serializer(str(number), each.grad)
            return self
        loaded = DetachedGradients()
        text = serializer("names", None)
        rows = [] if text is None else json.loads(np.asarray(text).tobytes())
        for number, (name, scale, present) in enumerate(rows):
            grad = serializer(str(number), None) if present else None
            loaded[name] = DetachedGradient(None, grad, scale)
        return loaded


def _owns_memory(array: Any) -> bool:
    flags = array.flags
    # CuPy's arrays are always writeable, and have no such flag.
    return bool(flags.owndata and flags.c_contiguous and getattr(flags, "writeable", True))


def _is_like(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.dtype == other.dtype)
