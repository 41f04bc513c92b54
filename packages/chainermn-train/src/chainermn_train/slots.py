"""What a group of ranks has alike: one list of slots, each with a name, a getter and a setter.

The list is made anew at each use, since parameters get values and links are replaced.
Functions that describe, compare, send or save slots are loops over the list.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase
from chainermn_comm.signatures import mismatch_error, view_of

from .collective_errors import raise_together
from .host_arrays import to_host

OPERATION = "broadcast of rank 0's state"
HYPERPARAMETERS = "hyperparameters"
LOSS_SCALING = (
    "the loss scale (call loss_scaling() or set_loss_scale() with the same arguments on "
    "all ranks)"
)
# Chainer's attributes: the loss scale, whether it adapts, its factor, and whether it has
# ever been too large.
_SCALING = (
    "_loss_scale",
    "_loss_scaling_is_dynamic",
    "_loss_scaling_multiplier",
    "_loss_scaling_isnan_ever",
)
VALUE = "value of parameter "
# The slot of an update rule is a dict of HYPERPARAMETERS and of these.
RULE = "update rule"
STATE = "state"
MASTER = "float32 value"
ARRAYS = (STATE, MASTER)


class Slot(NamedTuple):
    """A part of the state that is the same on all ranks.

    Attributes:
        name: a description in words, the same on all ranks.
        get: returns the value: an array on any device, a number, a dict of these, or
            another plain value; None if there is no value yet.
        set: takes a value that ``get`` has returned on any rank.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]


class ArrayForm(NamedTuple):
    """The description of an array."""

    dtype: str
    shape: tuple[int, ...]
    # A checksum of the elements, in which all NaNs are equal; 0 if it isn't needed.
    checksum: int


# By the slots' names: their values, with forms in the place of arrays.
Facts: TypeAlias = dict[str, Any]


def slots_of(optimizer: Any) -> list[Slot]:
    """Return all slots of a Chainer optimizer and its model."""
    return [
        *compared_slots(optimizer),
        # Each rank's own iterator may count epochs.
        _attribute_slot("epoch", optimizer, "epoch"),
        *persistent_slots(optimizer.target),
    ]


def compared_slots(optimizer: Any) -> list[Slot]:
    """Return the slots whose values differ between ranks only if the ranks have drifted apart."""
    return [
        *setting_slots(optimizer),
        _attribute_slot("t", optimizer, "t"),
        *value_slots(optimizer.target),
    ]


def value_slots(model: Any) -> list[Slot]:
    """Return the slots of a model's parameters."""
    return [
        _attribute_slot(f"{VALUE}{name}", param, "array")
        for name, param in named_parameters(model)
    ]


def setting_slots(optimizer: Any) -> list[Slot]:
    """Return the slots of hyperparameters, of loss scaling, and of update rules."""
    hyperparam = getattr(optimizer, "hyperparam", None)  # chainer.Optimizer has none
    return [
        Slot(
            HYPERPARAMETERS,
            partial(numbers_of, hyperparam),
            partial(_set_numbers, hyperparam),
        ),
        Slot(
            LOSS_SCALING,
            partial(scaling_of, optimizer),
            vars(optimizer).update,
        ),
        *[
            Slot(
                f"parameter {name}",
                partial(_get_rule, param),
                partial(_set_rule, param),
            )
            for name, param in named_parameters(optimizer.target)
            if param.update_rule is not None
        ],
    ]


def persistent_slots(model: Any) -> list[Slot]:
    """Return the slots of persistent values, such as running means, by their paths.

    They are not compared, because they come from each rank's own examples.
    """
    return [
        _attribute_slot(f"{path.rstrip('/')}/{attribute}", link, attribute)
        for path, link in model.namedlinks()
        # Chainer has no public name for the set; 7.8.1 is its last release but for
        # repairs.
        for attribute in sorted(link._persistent)
    ]


def named_parameters(target: Any) -> list[tuple[str, Any]]:
    """Return a model's parameters in the order of their names, each once.

    A parameter that two links share has the first of its names. RuntimeError without a
    model.
    """
    if target is None:
        raise RuntimeError("the optimizer has no model: call its `setup(model)` first")
    by_id: dict[int, tuple[str, Any]] = {}
    for name, param in sorted(target.namedparams(), key=operator.itemgetter(0)):
        by_id.setdefault(id(param), (name, param))
    return list(by_id.values())


# Operations on a list of slots.


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the function's result for a value; for a dict, the dict of its values' results."""
    if isinstance(value, dict):
        return {key: map_leaves(function, each) for key, each in value.items()}
    return function(value)


def facts_of(slots: Iterable[Slot], with_checksums: bool = False) -> Facts:
    """Return the slots' values by name, with the form of each array in the place of the array."""
    fact = partial(_fact, with_checksums)
    return {slot.name: map_leaves(fact, slot.get()) for slot in slots}


def entries_of(facts: Facts) -> list[tuple[str, str]]:
    """Return a name and a text for each fact; the text of a number doesn't depend on its type."""
    entries = []
    for name, fact in facts.items():
        if isinstance(fact, dict):
            keys = sorted(fact, key=_by_cause)
            inner = {f"{key} of {name}": fact[key] for key in keys}
            entries += entries_of(inner)
        else:
            entries.append((name, _shown(fact)))
    return entries


def _by_cause(key: str) -> tuple[bool, bool, str]:
    """Order what an update rule has: arrays last, since settings explain their differences."""
    return key in ARRAYS, key != "enabled", key


def raise_if_different(operation: str, rank: int, rows: Sequence[Facts]) -> None:
    """Raise RankMismatchError that names the first of all ranks' facts that differs."""
    views = [view_of(operation, entries_of(facts)) for facts in rows]
    if len(set(views)) > 1:
        raise mismatch_error(operation, rank, views)


def broadcast_slots(
    communicator: CommunicatorBase, optimizer: Any, rows: Sequence[Facts]
) -> None:
    """Give rank 0's values to all ranks, which have each other's facts (collective).

    Numbers are taken from rank 0's facts; arrays are broadcast. If rank 0 has no
    value, the first rank that has one gives it: a link learns the shapes of its
    parameters and statistics from its first examples, and rank 0 may have had none.

    Raises:
        RankMismatchError: ranks have parameters of different names.
    """
    rank = communicator.rank
    with raise_together(communicator.handshake, OPERATION):
        for name, param in named_parameters(optimizer.target):
            _, form = _first_with(VALUE + name, rows)
            if form is not None and not param.is_initialized:
                param.initialize(form.shape)
                # Without this, Chainer raises when somebody asks for the gradient.
                param.cleargrad()
        here = {slot.name: slot for slot in slots_of(optimizer)}

        def give(name: str) -> None:
            root, value = _first_with(name, rows)
            if rank == root:
                value = here[name].get()

            def receive(leaf: Any) -> Any:
                # The root has the array, and the other ranks have its form.
                if is_array(leaf) or isinstance(leaf, ArrayForm):
                    return communicator.bcast(leaf, root=root)
                return leaf

            value = map_leaves(receive, value)
            # `bcast_data` gives parameters to the other ranks, or raises.
            is_needed = rank == 0 or not name.startswith(VALUE)
            if rank != root and is_needed and name in here and value is not None:
                here[name].set(value)

        for name, fact in rows[0].items():
            if name.startswith(VALUE) and fact is None:
                give(name)
        communicator.bcast_data(optimizer.target)
        for name in rows[0]:
            if not name.startswith(VALUE):
                give(name)


def _first_with(name: str, rows: Sequence[Facts]) -> tuple[int, Any]:
    """Return the first rank that has a value, with this fact; rank 0 and None if none has."""
    for rank, facts in enumerate(rows):
        if facts.get(name) is not None:
            return rank, facts[name]
    return 0, None


def scaling_settings(optimizer: Any) -> dict[str, Any]:
    """Return the settings of loss scaling that no step changes."""
    scaling = scaling_of(optimizer)
    if scaling["_loss_scaling_is_dynamic"]:
        return {**scaling, "_loss_scale": "as adapted", _SCALING[-1]: None}
    return scaling


def scaling_checksum(optimizer: Any) -> int:
    """Return a checksum of everything that determines the next loss scales; 0 without scaling.

    A dynamic scale depends only on the mean gradients, whose bits are equal on all ranks.
    So scales that are equal once stay equal.
    """
    if getattr(optimizer, "_loss_scale", None) is None:
        return 0
    # As floats, since 128 and 128.0 are the same scale.
    numbers = [float(value or 0) for value in scaling_of(optimizer).values()]
    return zlib.crc32(repr(numbers).encode())


# Facts.


def is_array(value: Any) -> bool:
    """Return whether a value is an array that ranks can send as an array."""
    return isinstance(value, chainer.get_array_types()) and value.dtype.kind in "biufc"


def has_elements(value: Any) -> bool:
    """Return whether a hyperparameter may have a value for each element of a parameter."""
    return not _is_number(value) and np.ndim(value) > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or getattr(value, "ndim", None) == 0


def _fact(with_checksum: bool, value: Any) -> Any:
    if not is_array(value):
        return value
    checksum = 0
    if with_checksum:
        host = np.ascontiguousarray(to_host(value)).reshape(-1)
        if np.isnan(host.sum()):
            host = np.where(host == host, host, host.dtype.type(0))
        checksum = zlib.crc32(host.view(np.uint8).data)
    return ArrayForm(str(value.dtype), value.shape, checksum)


def _shown(fact: Any) -> str:
    fact = _fact(True, fact)
    if isinstance(fact, ArrayForm):
        return f"{fact.dtype} {fact.shape}, checksum {fact.checksum}"
    if _is_number(fact):
        return str(float(fact)).removesuffix(".0")
    return str(fact)


# Getters and setters.


def numbers_of(holder: Any) -> dict[str, Any]:
    """Return the public attributes of an object that are numbers, or arrays of numbers."""
    return {
        name: value[()] if hasattr(value, "dtype") else value
        for name, value in getattr(holder, "__dict__", {}).items()
        if not name.startswith("_") and (_is_number(value) or is_array(value))
    }


def _set_numbers(holder: Any, numbers: dict[str, Any]) -> None:
    for name in numbers_of(holder).keys() - numbers.keys():
        delattr(holder, name)
    for name, value in numbers.items():
        setattr(holder, name, value)


def scaling_of(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's attributes that scale losses."""
    return {name: getattr(optimizer, name, None) for name in _SCALING}


def _attribute_slot(name: str, holder: Any, attribute: str) -> Slot:
    return Slot(
        name,
        lambda: getattr(holder, attribute, None),
        lambda value: setattr(holder, attribute, _sent_to(holder, value)),
    )


def _get_rule(param: Any) -> dict[str, Any]:
    """Return the state and the numbers of an update rule.

    The numbers are ``t``, ``enabled``, and numbers outside its state, such as
    ``beta_power`` of :class:`chainer.optimizers.MSVAG`.
    """
    rule = param.update_rule
    return {
        RULE: numbers_of(rule),
        HYPERPARAMETERS: numbers_of(rule.hyperparam),
        STATE: rule.state,
        MASTER: master_of(param),
    }


def _set_rule(param: Any, given: dict[str, Any]) -> None:
    rule = param.update_rule
    _set_numbers(rule, given[RULE])
    _set_numbers(rule.hyperparam, given[HYPERPARAMETERS])
    rule._state = map_leaves(partial(_sent_to, param), given[STATE])
    set_master(param, given[MASTER])


def master_of(param: Any) -> Any:
    """Return the float32 array that an update rule keeps beside a float16 parameter, or None."""
    master = getattr(param.update_rule, "_fp32_param", None)
    return master.array if isinstance(master, chainer.Parameter) else None


def set_master(param: Any, array: Any) -> None:
    """Set the float32 array; None lets the rule make it anew."""
    master = None
    if array is not None:
        master = chainer.Parameter(param.device.send(array), name=param.name)
    param.update_rule._fp32_param = master


def _sent_to(holder: Any, value: Any) -> Any:
    """Return an array on the device of a parameter or a link; anything else as it is."""
    return holder.device.send(value) if is_array(value) else value
