"""The state of a multi-node optimizer, saved and loaded in the middle of what it does."""

from __future__ import annotations

from typing import Any

import chainer

from chainermn_comm import CommunicatorBase

from .delayed_exchange import DelayedGradientExchange
from .detached_gradients import DetachedGradients
from .gradient_accumulator import GradientAccumulator
from .mixed_precision import serialize_loss_scale, serialize_master_weights, update_rules


def serialize_state(
    optimizer: Any,
    accumulator: GradientAccumulator,
    delayed: DelayedGradientExchange | None,
    communicator: CommunicatorBase,
    serializer: Any,
) -> None:
    """Save or load Chainer's optimizer, gradients in flight and accumulated, and master weights.

    ValueError if the stored gradients don't fit; what made the exchange in flight fail is raised.
    """
    _serialize_optimizer(optimizer, serializer)
    loading = isinstance(serializer, chainer.serializer.Deserializer)
    means = None if loading or delayed is None else delayed.means()
    try:
        own = serializer["chainermn"]
        in_flight = own("in_flight", means is not None)
    except KeyError:  # Chainer's own snapshot
        accumulator.reset()
        if delayed is not None:
            delayed.put(None)
        return
    serialize_loss_scale(optimizer, own)
    serialize_master_weights(optimizer.target, own["masters"])
    accumulator.serialize(own["group"], communicator.rank, communicator.size)
    if in_flight:
        means = (means or DetachedGradients()).serialize(own["means"])
    if not loading:
        return
    if delayed is not None:
        delayed.put(means)
    elif means is not None:
        raise ValueError("the snapshot holds gradients in flight: use double_buffering=True")


def _serialize_optimizer(optimizer: Any, serializer: Any) -> None:
    """Do what :meth:`chainer.Optimizer.serialize` does, also where a parameter was never updated.

    The update rule of such a parameter has no state, and Chainer saves none; but when it loads,
    it asks for one unless the rule is disabled (KeyError). That is the case of every snapshot
    taken before the first step.
    """
    rules_without_state = []
    if isinstance(serializer, chainer.serializer.Deserializer):
        for name, rule in update_rules(optimizer.target).items():
            if rule.enabled and _num_updates(serializer[name]) == 0:
                rule._state, rule.enabled = None, False
                rules_without_state.append(rule)
    try:
        optimizer.serialize(serializer)
    finally:
        for rule in rules_without_state:
            rule.enabled = True


def _num_updates(serializer: Any) -> int | None:
    """Return the number of updates of a saved rule; None if the snapshot doesn't tell."""
    try:
        count = serializer("t", None)
    except KeyError:
        return None
    return None if count is None else int(count)
