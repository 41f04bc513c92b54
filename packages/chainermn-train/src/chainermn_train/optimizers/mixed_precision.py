"""Training in float16: loss scaling and float32 master weights, which Chainer doesn't save."""

from __future__ import annotations

from typing import Any

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase

from .parameter_set import ParameterSet
from .stored_arrays import StoredArray, serialize_arrays

_SCALING = (
    "_loss_scale",
    "_loss_scaling_is_dynamic",
    "_loss_scaling_multiplier",
    "_loss_scaling_isnan_ever",
)
_UNSCALED = (None, False, None, None)


def loss_scaling(optimizer: Any) -> tuple[Any, ...]:
    """Return all that the next loss scales depend on; equal on all ranks, they stay so.

    Whether a step is skipped, and with it the dynamic scale, follows from the mean gradients,
    whose bits are equal on all ranks: a number that isn't finite on one makes that of all so.
    """
    if getattr(optimizer, "_loss_scale", None) is None:  # nothing else matters then
        return _UNSCALED
    return tuple([getattr(optimizer, name, None) for name in _SCALING])


def set_loss_scaling(optimizer: Any, scaling: tuple[Any, ...]) -> None:
    """Set what :func:`loss_scaling` returned on another rank."""
    for name, value in zip(_SCALING, scaling, strict=True):
        if hasattr(optimizer, name):
            setattr(optimizer, name, value)


def describe_loss_scaling(optimizer: Any) -> dict[str, Any]:
    """Return what must be the same on all ranks, by names that say how to make it so."""
    scale, dynamic, *rest = loss_scaling(optimizer)
    scale = None if scale is None else float(scale)
    hint = "call loss_scaling() or set_loss_scale() with the same arguments on all ranks"
    return {
        f"the loss scale ({hint})": f"{'dynamic, now ' if dynamic else ''}{scale}",
        f"the adaptation of the loss scale ({hint})": tuple(rest),
    }


def scale_missing_gradients(optimizer: Any, params: ParameterSet) -> None:
    """Make the step undo the loss scale also where backward met no gradient on this rank.

    Chainer stores the scale in each parameter that backward meets. One that it met on other
    ranks only would get their scaled mean, and step along it unscaled.
    """
    _set_scale_where_missing(optimizer, params, optimizer._loss_scale)


def unscale_missing_gradients(optimizer: Any, params: ParameterSet) -> None:
    """Let hooks treat parameters that no rank has a gradient of as one process does."""
    _set_scale_where_missing(optimizer, params, None)


def _set_scale_where_missing(optimizer: Any, params: ParameterSet, scale: float | None) -> None:
    if optimizer._loss_scale is not None:
        for param in params.params:
            if param.grad is None:
                param._loss_scale = scale


def serialize_loss_scale(optimizer: Any, serializer: Any) -> None:
    """Save or load the scale, if the optimizer adapts it."""
    if getattr(optimizer, "_loss_scaling_is_dynamic", False):
        scale = serializer("loss_scale", optimizer._loss_scale)
        ever = serializer("overflowed", optimizer._loss_scaling_isnan_ever)
        optimizer._loss_scale = float(scale)
        optimizer._loss_scaling_isnan_ever = bool(ever)


def update_rules(target: Any) -> dict[str, Any]:
    """Return the update rules of a model's parameters, by name."""
    rules = {name: getattr(param, "update_rule", None) for name, param in target.namedparams()}
    return {name: rule for name, rule in rules.items() if rule is not None}


def _master_weights(target: Any) -> dict[str, Any]:
    """Return the float32 arrays that update rules keep beside float16 parameters, by name."""
    rules = update_rules(target).items()
    found = {name: getattr(rule, "_fp32_param", None) for name, rule in rules}
    return {
        name: param.array for name, param in found.items() if isinstance(param, chainer.Parameter)
    }


def _set_master_weights(target: Any, arrays: dict[str, Any]) -> None:
    """Set the float32 parameters; those that are not named are made anew when needed."""
    params, old = dict(target.namedparams()), _master_weights(target)
    for name, rule in update_rules(target).items():
        if name in arrays:
            array = params[name].device.send(arrays[name])
            rule._fp32_param = chainer.Parameter(array, name=params[name].name)
        elif name in old:
            rule._fp32_param = None


def serialize_master_weights(target: Any, serializer: Any) -> None:
    """Save or load the float32 parameters."""
    mine = [StoredArray(name, None, array) for name, array in _master_weights(target).items()]
    now = serialize_arrays(serializer, mine)
    if isinstance(serializer, chainer.Deserializer):
        _set_master_weights(target, {row.name: row.array for row in now})


def broadcast_master_weights(communicator: CommunicatorBase, target: Any) -> None:
    """Give rank 0's float32 parameters to all ranks, which have its float16 ones (collective)."""
    mine = _master_weights(target)
    names = communicator.bcast_obj(sorted(mine))
    masters = chainer.Link()
    if names:
        params = dict(target.namedparams())
        with masters.init_scope():
            for name in names:
                array = mine[name] if name in mine else params[name].array.astype(np.float32)
                setattr(masters, name, chainer.Parameter(array))
        communicator.bcast_data(masters)
    _set_master_weights(target, {name: getattr(masters, name).array for name in names})
