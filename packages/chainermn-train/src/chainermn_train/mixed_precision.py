"""What training in float16 adds to an optimizer's state: the loss scale and float32 parameters.

Chainer saves neither.
"""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase, RankMismatchError

from .held import Held, HeldGradients

_SCALING = (
    "_loss_scale",
    "_loss_scaling_is_dynamic",
    "_loss_scaling_multiplier",
    "_loss_scaling_isnan_ever",
)


def loss_scaling(optimizer: Any) -> tuple[Any, ...]:
    """All that the next loss scales follow from; equal on all ranks, they stay so.

    Whether a step is skipped, and with it the dynamic scale, follows from the mean gradients,
    whose bits are equal on all ranks: a number that isn't finite on one makes that of all so.
    """
    return tuple(getattr(optimizer, name, None) for name in _SCALING)


def require_same_loss_scaling(rank: int, scalings: list[tuple[Any, ...]]) -> None:
    """Raise RankMismatchError, as this rank, unless that of all ranks is the same."""
    if any(scaling != scalings[0] for scaling in scalings):
        scales = ", ".join(
            f"{'dynamic, now ' if dynamic else ''}{scale} on rank {each}"
            for each, (scale, dynamic, *_) in enumerate(scalings)
        )
        raise RankMismatchError(
            f"rank {rank}: ranks must scale losses alike, and the scale is {scales}; "
            "call loss_scaling() or set_loss_scale() with the same arguments on all ranks"
        )


def serialize_loss_scale(optimizer: Any, serializer: Any) -> None:
    """Save or load the scale, if the optimizer adapts it."""
    if getattr(optimizer, "_loss_scaling_is_dynamic", False):
        scale = serializer("loss_scale", optimizer._loss_scale)
        ever = serializer("overflowed", optimizer._loss_scaling_isnan_ever)
        optimizer._loss_scale = float(scale)
        optimizer._loss_scaling_isnan_ever = bool(ever)


def masters(target: Any) -> dict[str, Any]:
    """The float32 parameters that Chainer's update rules keep beside float16 ones, by name."""
    found = {}
    for name, param in target.namedparams():
        rule = getattr(param, "update_rule", None)
        if rule is not None and getattr(rule, "_fp32_param", None) is not None:
            found[name] = rule._fp32_param
    return found


def _set_masters(target: Any, arrays: dict[str, Any]) -> None:
    """Let these be the float32 parameters; those that are not named are made anew when needed."""
    for name, param in target.namedparams():
        rule = getattr(param, "update_rule", None)
        if rule is not None and (name in arrays or getattr(rule, "_fp32_param", None) is not None):
            master = None
            if name in arrays:
                master = chainer.Parameter(param.device.send(arrays[name]), name=param.name)
            rule._fp32_param = master


def serialize_masters(target: Any, serializer: Any) -> None:
    """Save or load the float32 parameters."""
    mine = {name: Held(None, param.array, None) for name, param in masters(target).items()}
    now = HeldGradients(mine).serialize(serializer)
    if isinstance(serializer, chainer.serializer.Deserializer):
        _set_masters(target, {name: held.grad for name, held in now.items()})


def broadcast_masters(communicator: CommunicatorBase, target: Any) -> None:
    """Give rank 0's float32 parameters to all ranks, which have its float16 ones (collective)."""
    names = communicator.bcast_obj(sorted(masters(target)))
    if not names:
        _set_masters(target, {})
        return
    mine = masters(target)
    params = dict(target.namedparams())
    model = HeldGradients()
    for name in names:
        array = mine[name].array if name in mine else params[name].array.astype(np.float32)
        model[name] = Held(array, None, None)
    communicator.bcast_data(model)
    _set_masters(target, {name: held.data for name, held in model.items()})
