"""The state of a Chainer optimizer: saved, loaded, described, and given by rank 0 to all ranks."""

from __future__ import annotations

import json
from numbers import Number
from typing import Any

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase

from .collective_errors import bcast_checked
from .host_arrays import to_host

_SCALING = (
    "_loss_scale",
    "_loss_scaling_is_dynamic",
    "_loss_scaling_multiplier",
    "_loss_scaling_isnan_ever",
)
# What belongs to a parameter, beside what its update rule's state has by other keys.
VALUE, MASTER = "value", "float32 value"


def save_arrays(
    serializer: Any, arrays: dict[str, Any], scale: float | None = None
) -> None:
    """Save arrays, or None, by names, with the loss scale that they were computed with."""
    heads = [[name, scale, array is not None] for name, array in arrays.items()]
    serializer("names", np.frombuffer(json.dumps(heads).encode(), np.uint8))
    for number, array in enumerate(arrays.values()):
        if array is not None:
            serializer(str(number), array)


def load_arrays(serializer: Any) -> tuple[dict[str, Any], float | None]:
    """Return what was saved."""
    text, arrays, scale = serializer("names", None), {}, None
    heads = [] if text is None else json.loads(np.asarray(text).tobytes())
    for number, (name, scale, present) in enumerate(heads):  # noqa: B007
        arrays[name] = serializer(str(number), None) if present else None
    return arrays, scale


def serialize_state(optimizer: Any, serializer: Any) -> None:
    """Do what :meth:`chainer.Optimizer.serialize` does, also where a rule had no state.

    The update rule of a parameter that was never updated, as in every snapshot taken
    before the first step, or has no values, has no state, and Chainer saves none; but
    when it loads, it asks for one unless the rule is disabled (KeyError). It takes what
    there is in either case.
    """
    rules_without_state = []
    if isinstance(serializer, chainer.Deserializer):
        params = dict(optimizer.target.namedparams())
        for name, rule in update_rules(optimizer.target).items():
            own = serializer[name]
            is_new = not is_missing(own, "t") and int(own("t", None)) == 0
            if rule.enabled and (is_new or not params[name].is_initialized):
                rule._state, rule.enabled = None, False
                rules_without_state.append(rule)
    try:
        optimizer.serialize(serializer)
    finally:
        for rule in rules_without_state:
            rule.enabled = True


def serialize_rules(optimizer: Any, serializer: Any) -> None:
    """Save or load the numbers of update rules, and the optimizer's class.

    ValueError if a snapshot is of another class.
    """
    kind = type(optimizer).__name__
    rules = update_rules(optimizer.target)
    if not isinstance(serializer, chainer.Deserializer):
        record = [kind, {name: numbers_of(rule) for name, rule in rules.items()}]
        serializer("rules", np.frombuffer(json.dumps(record).encode(), np.uint8))
    elif not is_missing(serializer, "rules"):
        text = np.asarray(serializer("rules", None)).tobytes()
        saved_kind, numbers = json.loads(text)
        if saved_kind != kind:
            raise ValueError(
                f"the stored state is of an optimizer {saved_kind}, and this one is {kind}: "
                "make it as it was, or load the model alone"
            )
        for name, rule in rules.items():
            vars(rule).update(numbers.get(name, {}))


def numbers_of(rule: Any) -> dict[str, Any]:
    """Return the numbers that an update rule has outside its state.

    These are ``t``, ``enabled``, and ``beta_power`` of Chainer's MSVAG.
    """
    return {
        name: value
        for name, value in getattr(rule, "__dict__", {}).items()
        if isinstance(value, int | float) and not name.startswith("_")
    }


def serialize_mixed_precision(optimizer: Any, serializer: Any) -> None:
    """Save or load an adapted loss scale, and float32 parameters, which Chainer doesn't save."""
    if getattr(optimizer, "_loss_scaling_is_dynamic", False):
        scale = serializer("loss_scale", optimizer._loss_scale)
        ever = serializer("overflowed", optimizer._loss_scaling_isnan_ever)
        optimizer._loss_scale = float(scale)
        optimizer._loss_scaling_isnan_ever = bool(ever)
    if isinstance(serializer, chainer.Deserializer):
        _set_master_weights(optimizer.target, load_arrays(serializer["masters"])[0])
    else:
        save_arrays(serializer["masters"], master_weights(optimizer.target))


def is_missing(serializer: Any, key: str) -> bool:
    """Return whether a snapshot that is being loaded lacks this value."""
    if not isinstance(serializer, chainer.Deserializer):
        return False
    try:
        return serializer(key, None) is None  # None: one that isn't strict
    except (KeyError, ValueError):  # ValueError: HDF5, where the whole group is missing
        return True


def loss_scaling(optimizer: Any) -> tuple[Any, ...]:
    """Return all that the next loss scales depend on; equal on all ranks, they stay so.

    Whether a step is skipped, and with it the dynamic scale, follows from the mean
    gradients, whose bits are equal on all ranks: a number that isn't finite on one
    makes that of all so.
    """
    if getattr(optimizer, "_loss_scale", None) is None:  # nothing else matters then
        return None, False, None, None
    return tuple([getattr(optimizer, name, None) for name in _SCALING])


def describe_settings(optimizer: Any, is_shared: bool) -> dict[str, Any]:
    """Return what must be set equally on all ranks, by names that say how to make it so.

    A dynamic loss scale's present value is left out unless the state ``is_shared``:
    rank 0's is about to go to all.
    """
    numbers = _hyperparameters(optimizer)
    scale, dynamic, multiplier, ever = loss_scaling(optimizer)
    shown: Any = None if scale is None else float(scale)
    if dynamic and not is_shared:
        shown, ever = "as adapted", None
    hint = (
        "call loss_scaling() or set_loss_scale() with the same arguments on all ranks"
    )
    return {
        "optimizer": type(optimizer).__name__,
        "hyperparameters": ", ".join(
            f"{name}={float(number)}" for name, number in numbers.items()
        ),
        f"the loss scale ({hint})": f"{'dynamic, now ' if dynamic else ''}{shown}",
        f"the adaptation of the loss scale ({hint})": (multiplier, ever),
    }


def _hyperparameters(optimizer: Any) -> dict[str, Any]:
    """Return the hyperparameters that are numbers, Python's or NumPy's, by name."""
    # chainer.Optimizer has none.
    hyperparam: Any = getattr(optimizer, "hyperparam", None)
    values = {} if hyperparam is None else hyperparam.get_dict()
    return {
        name: value
        for name, value in sorted(values.items())
        if isinstance(value, int | float) or getattr(value, "ndim", None) == 0
    }


def update_rules(target: Any) -> dict[str, Any]:
    """Return the update rules of a model's parameters, by name."""
    rules = {
        name: getattr(param, "update_rule", None)
        for name, param in target.namedparams()
    }
    return {name: rule for name, rule in rules.items() if rule is not None}


def keys_of(param: Any) -> list[str]:
    """Return the keys of all that belongs to a parameter now; see :func:`array_of`."""
    rule = getattr(param, "update_rule", None)
    keys = [VALUE] if param.array is not None else []
    keys += [MASTER] if master_weight(rule) is not None else []
    return keys + sorted(getattr(rule, "state", None) or {})


def array_of(param: Any, key: str) -> Any:
    """Return the array of that key; a number as one, and what is gone as one of no elements."""
    if key == VALUE:
        found = param.array
    elif key == MASTER:
        found = master_weight(getattr(param, "update_rule", None))
    else:
        found = (getattr(getattr(param, "update_rule", None), "state", None) or {}).get(
            key
        )
    if hasattr(found, "flags"):
        return found
    return np.array([found] if isinstance(found, Number) else [], np.complex128)


def updates_of(param: Any) -> int:
    """Return how often a parameter was updated."""
    return int(getattr(getattr(param, "update_rule", None), "t", 0))


def master_weight(rule: Any) -> Any:
    """Return the float32 array that an update rule keeps beside a float16 parameter, or None."""
    param = getattr(rule, "_fp32_param", None)
    return param.array if isinstance(param, chainer.Parameter) else None


def master_weights(target: Any) -> dict[str, Any]:
    """Return the float32 arrays that update rules keep beside float16 parameters, by name."""
    found = {name: master_weight(rule) for name, rule in update_rules(target).items()}
    return {name: array for name, array in found.items() if array is not None}


def _set_master_weights(target: Any, arrays: dict[str, Any]) -> None:
    """Set the float32 parameters; those that are not named are made anew when needed."""
    params, old = dict(target.namedparams()), master_weights(target)
    for name, rule in update_rules(target).items():
        if name in arrays:
            array = params[name].device.send(arrays[name])
            rule._fp32_param = chainer.Parameter(array, name=params[name].name)
        elif name in old:
            rule._fp32_param = None


def broadcast_state(
    communicator: CommunicatorBase, optimizer: Any, with_settings: bool
) -> None:
    """Give rank 0's numbers, moments, float32 parameters and loss scale to all (collective).

    So are its hyperparameters, ``with_settings``.
    """
    if communicator.size == 1:
        return
    target = optimizer.target
    rules, params = update_rules(target), dict(target.namedparams())

    def give() -> tuple[Any, ...]:
        states = {
            name: (numbers_of(rule), to_host(rule.state))
            for name, rule in rules.items()
        }
        masters = to_host(master_weights(target))
        counts = {
            n: getattr(optimizer, n) for n in ("t", "epoch") if hasattr(optimizer, n)
        }
        return (
            counts,
            loss_scaling(optimizer),
            states,
            masters,
            _hyperparameters(optimizer),
        )

    given = bcast_checked(communicator, "broadcast of the optimizer's state", give)
    if communicator.rank == 0:
        return
    counts, scaling, states, masters, hyperparameters = given
    for name, value in [*counts.items(), *zip(_SCALING, scaling, strict=True)]:
        if hasattr(optimizer, name):
            setattr(optimizer, name, value)
    for name, rule in rules.items():
        if name in states:
            numbers, state = states[name]
            vars(rule).update(numbers)
            rule._state = state and {
                key: params[name].device.send(it) if hasattr(it, "ndim") else it
                for key, it in state.items()
            }
    _set_master_weights(target, masters)
    if with_settings and hyperparameters:
        vars(optimizer.hyperparam).update(hyperparameters)
