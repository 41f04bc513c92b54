"""The state of a Chainer optimizer: saved and loaded, and given by rank 0 to all ranks."""

from __future__ import annotations

from typing import Any

import chainer

from chainermn_comm import CommunicatorBase

from ..collective_errors import bcast_checked
from ..host_arrays import to_host
from .mixed_precision import loss_scaling, set_loss_scaling, update_rules


def serialize_state(optimizer: Any, serializer: Any) -> None:
    """Do what :meth:`chainer.Optimizer.serialize` does, also where a parameter was never updated.

    The update rule of such a parameter has no state, and Chainer saves none; but when it loads,
    it asks for one unless the rule is disabled (KeyError). That is the case of every snapshot
    taken before the first step.
    """
    rules_without_state = []
    if isinstance(serializer, chainer.Deserializer):
        for name, rule in update_rules(optimizer.target).items():
            own = serializer[name]
            if rule.enabled and not is_missing(own, "t") and int(own("t", None)) == 0:
                rule._state, rule.enabled = None, False
                rules_without_state.append(rule)
    try:
        optimizer.serialize(serializer)
    finally:
        for rule in rules_without_state:
            rule.enabled = True


def is_missing(serializer: Any, key: str) -> bool:
    """Return whether a snapshot that is being loaded lacks this value."""
    if not isinstance(serializer, chainer.Deserializer):
        return False
    try:
        return serializer(key, None) is None  # None: one that isn't strict
    except (KeyError, ValueError):  # ValueError: HDF5, where the whole group is missing
        return True


def broadcast_state(communicator: CommunicatorBase, optimizer: Any) -> None:
    """Give rank 0's counts, moments and loss scale to all ranks (collective)."""
    rules, params = update_rules(optimizer.target), dict(optimizer.target.namedparams())

    def give() -> tuple[Any, ...]:
        states = {name: (rule.t, to_host(rule.state)) for name, rule in rules.items()}
        return optimizer.t, optimizer.epoch, loss_scaling(optimizer), states

    given = bcast_checked(communicator, "broadcast of the optimizer's state", give)
    if communicator.rank == 0:
        return
    optimizer.t, optimizer.epoch, scaling, states = given
    set_loss_scaling(optimizer, scaling)
    for name, rule in rules.items():
        if name in states:
            rule.t, state = states[name]
            device = params[name].device
            rule._state = state and {
                key: device.send(it) if hasattr(it, "ndim") else it for key, it in state.items()
            }
