"""An optimizer's state in a snapshot: Chainer's own entries, and what Chainer leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeAlias

import chainer
import numpy as np

from .host_arrays import to_host
from .slots import (
    ARRAYS,
    LOSS_SCALING,
    RULE,
    Slot,
    entries_of,
    map_leaves,
    master_of,
    named_parameters,
    set_master,
    setting_slots,
)

# A function that sets saved values; it returns in words which values it has changed.
Restorer: TypeAlias = Callable[[], list[str]]


def serialize_state(optimizer: Any, serializer: Any) -> None:
    """Do what :meth:`chainer.Optimizer.serialize` does, also for update rules without state.

    An update rule has no state before the first step, or if its parameter had no values
    in any step, and Chainer saves nothing for such a rule. When Chainer loads, it asks
    for the state of every enabled rule, and raises KeyError if there is none. So this
    function disables the rules that the snapshot has no state for while Chainer loads.
    """
    rules_without_state = []
    if isinstance(serializer, chainer.Deserializer):
        for name, param in named_parameters(optimizer.target):
            rule = param.update_rule
            if rule is None or not rule.enabled:
                continue
            if not param.is_initialized or not _has_state(rule, serializer[name]):
                rule._state = None
                rule.enabled = False
                rules_without_state.append(rule)
    try:
        optimizer.serialize(serializer)
    finally:
        for rule in rules_without_state:
            rule.enabled = True


def _has_state(rule: Any, serializer: Any) -> bool:
    """Return whether a snapshot has any entry of an update rule's state."""
    example = copy(rule)  # a fresh state has the same keys as any other
    example._state = {}
    array = np.zeros(1, np.float32)
    example.init_state(chainer.Variable(array, grad=array))
    keys = example._state
    return not keys or any(saved_value(serializer, key) is not None for key in keys)


def serialize_settings(optimizer: Any, serializer: Any) -> None:
    """Save or load an optimizer's class, and all numbers of :func:`setting_slots`.

    The numbers of update rules and a dynamic loss scale are set at once. Extensions of
    a trainer may set hyperparameters, and freeze links, when they are initialised. So
    this function adds a :data:`Restorer`, which sets all numbers, to the list
    ``serializer.restorers``, and the caller calls the restorer when training begins.
    Chainer's own serializers have no such list; with them, no hyperparameters are loaded.

    Raises:
        ValueError: the snapshot is of an optimizer of another class.
    """
    kind = type(optimizer).__name__
    slots = setting_slots(optimizer)
    if not isinstance(serializer, chainer.Deserializer):
        numbers = map_leaves(_encoded, _numbers_of(slots))
        text = json.dumps({"class": kind, "numbers": numbers})
        serializer("settings", np.frombuffer(text.encode(), np.uint8))
        return
    stored = saved_value(serializer, "settings")
    if stored is None:  # a snapshot of Chainer's own
        return
    record = json.loads(stored.tobytes())
    if record["class"] != kind:
        raise ValueError(
            f"the stored state is of an optimizer {record['class']}, and this one is {kind}: "
            "make it as it was, or load the model alone"
        )
    saved = map_leaves(_decoded, record["numbers"])
    at_once = {name: {RULE: own[RULE]} for name, own in saved.items() if RULE in own}
    if saved[LOSS_SCALING]["_loss_scaling_is_dynamic"]:
        at_once[LOSS_SCALING] = saved[LOSS_SCALING]
    _restore(slots, at_once)
    restorers = getattr(serializer, "restorers", None)
    if restorers is not None:
        restorers.append(partial(_restore, slots, saved))


def _restore(slots: Sequence[Slot], saved: dict[str, Any]) -> list[str]:
    """Set the saved numbers; return in words which numbers were different before."""
    before = dict(entries_of(_numbers_of(slots)))
    for slot in slots:
        slot.set({**slot.get(), **saved.get(slot.name, {})})
    return [
        f"{name}: {text} (here: {before.get(name)})"
        for name, text in entries_of(_numbers_of(slots))
        if before.get(name) != text
    ]


def _numbers_of(slots: Sequence[Slot]) -> dict[str, Any]:
    """Return the values of slots, without arrays."""
    numbers = {}
    for slot in slots:
        own = slot.get()
        numbers[slot.name] = {key: own[key] for key in own if key not in ARRAYS}
    return numbers


def serialize_masters(optimizer: Any, serializer: Any) -> None:
    """Save or load the float32 values beside float16 parameters, which Chainer doesn't save."""
    is_loaded = isinstance(serializer, chainer.Deserializer)
    for name, param in named_parameters(optimizer.target):
        key = name.lstrip("/")
        master = master_of(param)
        if is_loaded and hasattr(param.update_rule, "_fp32_param"):
            set_master(param, saved_value(serializer, key))
        elif master is not None:
            serializer(key, master)


def saved_value(serializer: Any, key: str) -> Any:
    """Return a value of a snapshot that is being loaded; None if the snapshot lacks it."""
    try:
        return serializer(key, None)
    except (
        KeyError,
        ValueError,
    ):  # HDF5 raises ValueError if the whole group is missing
        return None


def _encoded(value: Any) -> Any:
    """Return a number or an array for JSON; those of NumPy with their dtype."""
    if not hasattr(value, "dtype"):
        return value
    return [np.asarray(to_host(value), float).tolist(), str(value.dtype)]


def _decoded(value: Any) -> Any:
    """Return the number or array that :func:`_encoded` was given."""
    if not isinstance(value, list):
        return value
    numbers, dtype = value
    return np.array(numbers, dtype)[()]
