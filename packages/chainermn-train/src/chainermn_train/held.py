"""Gradients taken out of a model: to be added up, or sent while the model makes new ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import chainer
import numpy as np


@dataclass(eq=False)
class Held:
    """A gradient, as a communicator wants to see a parameter.

    Attributes:
        data: the parameter's array, which says the gradient's shape and dtype; None if the
            parameter isn't initialised.
        grad: an array that nobody else has; None if there is no gradient.
        scale: what Chainer multiplied the loss with for it; None if nothing.
    """

    data: Any
    grad: Any
    scale: float | None


class HeldGradients(dict[str, Held]):
    """Gradients by their parameters' names; to a communicator, a model."""

    def namedparams(self) -> Iterator[tuple[str, Held]]:
        return iter(self.items())

    @classmethod
    def taken_from(cls, target: Any) -> HeldGradients:
        """Move the gradients out of a link, whose gradients are None then.

        Their arrays are moved, not copied, wherever the parameter was their only owner. Others
        (shared between parameters, views, read-only ones, those that the user has too) are
        copied: somebody might write into them meanwhile.
        """
        held = cls()
        for name, param in target.namedparams():
            grad = param.grad if param.is_initialized else None
            param.cleargrad()
            # One reference is `grad`, one may be the function's argument.
            if grad is not None and (sys.getrefcount(grad) > 2 or not _owns_memory(grad)):
                with chainer.using_device(param.device):
                    grad = param.device.xp.array(grad, order="C")
            held[name] = Held(param.array, grad, param._loss_scale)
            del grad
        return held

    def give_to(self, target: Any) -> None:
        """Make these the gradients of a link, each with the loss scale it was made with.

        A parameter of which none is held, or one of another shape or dtype, has none then.
        """
        for name, param in target.namedparams():
            held = self.get(name)
            grad = None if held is None else held.grad
            if param.array is None or grad is None or not _alike(grad, param.array):
                param.cleargrad()
            else:
                param.grad = param.device.send(grad)
            if held is not None:
                param._loss_scale = held.scale

    def forget(self, names: set[str]) -> None:
        """Have no gradient any more for these parameters."""
        for name in names & self.keys():
            self[name].grad = None

    def serialize(self, serializer: Any) -> HeldGradients:
        """Save these, or load others in their place; returns which there are then."""
        rows = [[name, held.scale, held.grad is not None] for name, held in self.items()]
        if not isinstance(serializer, chainer.serializer.Deserializer):
            serializer("names", np.frombuffer(json.dumps(rows).encode(), np.uint8))
            for number, held in enumerate(self.values()):
                if held.grad is not None:
                    serializer(str(number), held.grad)
            return self
        loaded = HeldGradients()
        text = serializer("names", None)
        rows = [] if text is None else json.loads(np.asarray(text).tobytes())
        for number, (name, scale, present) in enumerate(rows):
            loaded[name] = Held(None, serializer(str(number), None) if present else None, scale)
        return loaded


def _owns_memory(array: Any) -> bool:
    flags = array.flags
    # CuPy's arrays are all writeable, and say nothing of it.
    return bool(flags.owndata and flags.c_contiguous and getattr(flags, "writeable", True))


def _alike(one: Any, other: Any) -> bool:
    alike: bool = one.shape == other.shape and one.dtype == other.dtype
    return alike
