"""What a group of ranks has alike: one list of slots, each with a name, a getter and a setter.

The list is made anew where it is needed, since parameters get values, rules get state
and links are replaced. To describe, compare, send or save all of it are loops.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase

from .collective_errors import allgather_checked, raise_together
from .host_arrays import to_host

OPERATION = "broadcast of rank 0's state"
HYPERPARAMETERS = "hyperparameters"
VALUE = "value of parameter "
_SCALING_HINT = (
    "call loss_scaling() or set_loss_scale() with the same arguments on all ranks"
)
LOSS_SCALE = f"the loss scale ({_SCALING_HINT})"
LOSS_SCALE_ADAPTS = f"whether the loss scale adapts ({_SCALING_HINT})"
_SCALING = {
    LOSS_SCALE: "_loss_scale",
    LOSS_SCALE_ADAPTS: "_loss_scaling_is_dynamic",
    f"the adaptation of the loss scale ({_SCALING_HINT})": "_loss_scaling_multiplier",
    "an overflow so far": "_loss_scaling_isnan_ever",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One thing that all ranks have alike.

    Attributes:
        name: what it is in words, the same on all ranks.
        get: returns the value: an array on any device, a number, a dict of numbers, or
            another plain value; None if there is none.
        set: takes a value that ``get`` gave on this rank or on another one.
        is_compared: whether ranks that differ here have drifted apart.
        comes_from_any: whether the first rank that has a value gives it to all where
            rank 0 has none; otherwise no rank has one then.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    is_compared: bool = True
    comes_from_any: bool = False


class ArrayForm(NamedTuple):
    """What a description says of an array."""

    dtype: str
    shape: tuple[int, ...]


# By the slots' names: a plain value, or the form of an array.
Facts: TypeAlias = dict[str, Any]


def slots_of(optimizer: Any) -> list[Slot]:
    """Return all slots of a Chainer optimizer and its model, those of numbers first.

    The setters of numbers make room for arrays, such as the moments of a rule that has
    made no update. So who sets arrays makes the list after the numbers were set.
    """
    return [
        *setting_slots(optimizer),
        *_progress_slots(optimizer),
        *array_slots(optimizer.target),
        *persistent_slots(optimizer.target),
    ]


def setting_slots(optimizer: Any) -> list[Slot]:
    """Return the slots of numbers that the user or a rule keeps, by their holders.

    These are hyperparameters, also those that a parameter has of its own, and the
    numbers of update rules: ``t``, ``enabled``, and what a rule has outside its
    ``state``, such as ``beta_power`` of :class:`chainer.optimizers.MSVAG`.
    """
    # chainer.Optimizer has no hyperparameters.
    slots = [_numbers_slot(HYPERPARAMETERS, getattr(optimizer, "hyperparam", None))]
    for name, rule in update_rules(optimizer.target).items():
        own = getattr(rule, "hyperparam", None)
        slots.append(_numbers_slot(f"updates of parameter {name}", rule))
        slots.append(_numbers_slot(f"{HYPERPARAMETERS} of parameter {name}", own))
    return slots


def _progress_slots(optimizer: Any) -> list[Slot]:
    """Return the slots of numbers that training changes."""
    slots = [
        _attribute_slot("t", optimizer, "t"),
        # Each rank's own iterator may count epochs.
        _attribute_slot("epoch", optimizer, "epoch", is_compared=False),
    ]
    for name, attribute in _SCALING.items():
        slots.append(_attribute_slot(name, optimizer, attribute))
    for name, rule in update_rules(optimizer.target).items():
        get = partial(_state_without_arrays, rule)
        make_room = partial(_make_room_in_state, rule)
        slots.append(Slot(f"state of parameter {name}", get, make_room))
    return slots


def array_slots(target: Any) -> list[Slot]:
    """Return the slots of parameters, of their float32 values, and of rules' states."""
    slots = []
    for name, param in target.namedparams():
        get = partial(getattr, param, "array")
        set_value = partial(_set_value, param)
        slots.append(Slot(f"{VALUE}{name}", get, set_value, comes_from_any=True))
        rule = getattr(param, "update_rule", None)
        if hasattr(rule, "_fp32_param"):
            slots.append(master_slot(name, param))
        for key, value in (getattr(rule, "state", None) or {}).items():
            if value is None or is_array(value):
                get = partial(_moment, rule, key)
                set_moment = partial(_set_moment, param, key)
                slots.append(Slot(f"{key} of parameter {name}", get, set_moment))
    return slots


def master_slot(name: str, param: Any) -> Slot:
    """Return the slot of the float32 value that a rule keeps beside a float16 parameter."""
    get = partial(_master, param.update_rule)
    return Slot(f"float32 {VALUE}{name}", get, partial(_set_master, param))


def persistent_slots(model: Any) -> list[Slot]:
    """Return the slots of persistent values, such as running means, by their paths.

    A link learns the shapes of its statistics from its first examples, as its
    parameters'. A rank that has had none gets both from others; without the statistics,
    a lazy :class:`~chainer.links.BatchNormalization` would begin anew later, and its
    parameters with it.
    """
    return [
        Slot(
            f"{path.rstrip('/')}/{attribute}",
            partial(getattr, link, attribute),
            partial(_set_persistent, link, attribute),
            is_compared=False,  # it comes from each rank's own examples
            comes_from_any=True,
        )
        for path, link in model.namedlinks()
        # Chainer has no public name for the set; 7.8.1 is its last release but for
        # repairs.
        for attribute in sorted(link._persistent)
    ]


def update_rules(target: Any) -> dict[str, Any]:
    """Return the update rules of a model's parameters, by name."""
    rules = {
        name: getattr(param, "update_rule", None)
        for name, param in target.namedparams()
    }
    return {name: rule for name, rule in rules.items() if rule is not None}


def is_array(value: Any) -> bool:
    """Return whether a value is an array that ranks can send as one."""
    return isinstance(value, chainer.get_array_types()) and value.dtype.kind in "biufc"


def is_number(value: Any) -> bool:
    """Return whether a value is a number, Python's or NumPy's."""
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0


# What is done with a list.


def facts_of(slots: Iterable[Slot]) -> Facts:
    """Return what a list holds, with the forms of arrays instead of their elements.

    None stands for a value that another rank may give.
    """
    facts: Facts = {}
    for slot in slots:
        value = slot.get()
        if is_array(value):
            facts[slot.name] = ArrayForm(str(value.dtype), value.shape)
        elif value is not None or slot.comes_from_any:
            facts[slot.name] = value
    return facts


def shown(fact: Any) -> str:
    """Return a fact in words, which are equal for equal numbers of whatever types."""
    if isinstance(fact, ArrayForm):
        return f"{fact.dtype} {fact.shape}"
    if isinstance(fact, dict):
        return ", ".join(f"{name}={shown(fact[name])}" for name in sorted(fact))
    if is_number(fact):
        return str(float(fact)).removesuffix(".0")
    return str(fact)


def broadcast_slots(
    communicator: CommunicatorBase,
    optimizer: Any,
    rows: Sequence[Facts],
    with_hyperparameters: bool,
) -> None:
    """Give rank 0's values to all ranks, by the facts of all ranks (collective).

    Numbers come out of the facts, and arrays travel as arrays. RankMismatchError if
    ranks have parameters of different names.
    """
    names = [name for name in rows[0] if name != HYPERPARAMETERS]
    if with_hyperparameters:
        names.append(HYPERPARAMETERS)
    givers = {name: _giver(name, rows) for name in names}
    target = optimizer.target
    with raise_together(communicator.handshake, OPERATION):
        for name, param in target.namedparams():
            form = rows[givers.get(VALUE + name, 0)].get(VALUE + name)
            if form is not None and not param.is_initialized:
                param.initialize(form.shape)
        communicator.bcast_data(target)
        for slot in slots_of(optimizer):
            if slot.name in givers:
                fact = rows[givers[slot.name]][slot.name]
            elif slot.name == HYPERPARAMETERS or slot.comes_from_any:
                continue
            else:
                fact = None
            if not isinstance(fact, ArrayForm) and slot.get() is not fact:
                slot.set(fact)
        here = {slot.name: slot for slot in slots_of(optimizer)}
        for name, root in givers.items():
            if name.startswith(VALUE) or not isinstance(rows[root][name], ArrayForm):
                continue
            slot = here.get(name)
            own = slot.get() if communicator.rank == root else None
            array = communicator.bcast(own, root=root)
            if slot is not None and communicator.rank != root:
                slot.set(array)


def _giver(name: str, rows: Sequence[Facts]) -> int:
    """Return the first rank that has a value; rank 0 if none has."""
    for rank, facts in enumerate(rows):
        if facts.get(name) is not None:
            return rank
    return 0


def is_same_on_all(communicator: CommunicatorBase, optimizer: Any) -> bool:
    """Return whether ranks have the same bits of all that is compared (collective)."""

    def digest() -> list[Any]:
        found = []
        for slot in slots_of(optimizer):
            if slot.is_compared:
                value = slot.get()
                found.append((slot.name, checksum(value) if is_array(value) else value))
        return found

    rows = allgather_checked(communicator, "comparison of parameters", digest)
    return rows.count(rows[0]) == len(rows)


def checksum(array: Any) -> tuple[str, tuple[int, ...], int]:
    """Return the dtype and the shape of an array, and a checksum of its elements."""
    host = np.ascontiguousarray(to_host(array))
    crc = zlib.crc32(host.reshape(-1).view(np.uint8).data)
    return str(array.dtype), array.shape, crc


# Getters and setters.


def _numbers_slot(name: str, holder: Any) -> Slot:
    """Return the slot of all public attributes of an object that are numbers."""
    return Slot(name, partial(_numbers_of, holder), partial(_set_numbers, holder))


def _numbers_of(holder: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in getattr(holder, "__dict__", {}).items()
        if not name.startswith("_") and is_number(value)
    }


def _set_numbers(holder: Any, numbers: dict[str, Any]) -> None:
    for name in _numbers_of(holder).keys() - numbers.keys():
        delattr(holder, name)
    for name, value in numbers.items():
        setattr(holder, name, value)


def _attribute_slot(
    name: str, holder: Any, attribute: str, is_compared: bool = True
) -> Slot:
    get = partial(getattr, holder, attribute, None)
    return Slot(name, get, partial(setattr, holder, attribute), is_compared)


def _state_without_arrays(rule: Any) -> dict[str, Any] | None:
    """Return a rule's state with None in the place of arrays; None if it has no state."""
    state = getattr(rule, "state", None)
    if state is None:
        return None
    return {key: None if is_array(value) else value for key, value in state.items()}


def _make_room_in_state(rule: Any, given: dict[str, Any] | None) -> None:
    """Give a rule a state with these keys; arrays that it has stay until others are set."""
    if given is None:
        rule._state = None
        return
    before = rule.state or {}
    rule._state = {
        key: before.get(key) if value is None else value for key, value in given.items()
    }


def _moment(rule: Any, key: str) -> Any:
    return (rule.state or {}).get(key)


def _set_moment(param: Any, key: str, array: Any) -> None:
    if array is None:
        param.update_rule.state.pop(key, None)
    else:
        param.update_rule.state[key] = param.device.send(array)


def _master(rule: Any) -> Any:
    param = rule._fp32_param
    return param.array if isinstance(param, chainer.Parameter) else None


def _set_master(param: Any, array: Any) -> None:
    """Set the float32 value; without one it is made anew when it is needed."""
    master = None
    if array is not None:
        master = chainer.Parameter(param.device.send(array), name=param.name)
    param.update_rule._fp32_param = master


def _set_value(param: Any, array: Any) -> None:
    if not param.is_initialized:
        param.initialize(array.shape)
    param.array = param.device.send(array)


def _set_persistent(link: Any, attribute: str, value: Any) -> None:
    if is_array(value):
        value = link.device.send(value)
    setattr(link, attribute, value)
