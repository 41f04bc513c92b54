"""Saves and loads what a multi-node optimizer is in the middle of."""

from __future__ import annotations

from typing import Any

import chainer

from chainermn_comm import CommunicatorBase

from .accumulation import Accumulation
from .double_buffering import DoubleBuffer
from .held import HeldGradients
from .mixed_precision import serialize_loss_scale, serialize_masters


def serialize_state(
    optimizer: Any,
    group: Accumulation,
    buffer: DoubleBuffer | None,
    communicator: CommunicatorBase,
    serializer: Any,
) -> None:
    """Save or load Chainer's optimizer, and what is in flight, added up and in float32.

    Args:
        optimizer: Chainer's.
        group: what this rank has added up.
        buffer: what is in flight, with double buffering.
        communicator: says whose sums these are.
        serializer: a Chainer serializer or deserializer.

    Raises:
        ValueError: what is loaded holds gradients that ``group`` or ``buffer`` can't take.
        BaseException: what made the exchange in flight fail.
    """
    _serialize_optimizer(optimizer, serializer)
    loading = isinstance(serializer, chainer.serializer.Deserializer)
    means = None if loading or buffer is None else buffer.means()
    try:
        own = serializer["chainermn"]
        in_flight = own("in_flight", means is not None)
    except KeyError:  # Chainer's own snapshot
        group.drop()
        if buffer is not None:
            buffer.put(None)
        return
    serialize_loss_scale(optimizer, own)
    serialize_masters(optimizer.target, own["masters"])
    group.serialize(own["group"], communicator.rank, communicator.size)
    if in_flight:
        means = (means or HeldGradients()).serialize(own["means"])
    if not loading:
        return
    if buffer is not None:
        buffer.put(means)
    elif means is not None:
        raise ValueError("the snapshot holds gradients in flight: use double_buffering=True")


def _serialize_optimizer(optimizer: Any, serializer: Any) -> None:
    """What :meth:`chainer.Optimizer.serialize` does, also where a parameter was never updated.

    Its update rule has no state then, and Chainer saves none; but when it loads, it asks for one
    unless the rule is disabled (KeyError). So it was with a snapshot taken before the first step.
    """
    resting = []
    if isinstance(serializer, chainer.serializer.Deserializer):
        for name, param in optimizer.target.namedparams():
            rule = getattr(param, "update_rule", None)
            if rule is not None and rule.enabled and _updates(serializer[name]) == 0:
                rule._state, rule.enabled = None, False
                resting.append(rule)
    try:
        optimizer.serialize(serializer)
    finally:
        for rule in resting:
            rule.enabled = True


def _updates(serializer: Any) -> int | None:
    """How many a rule had made when it was saved; None if the snapshot doesn't say."""
    try:
        count = serializer("t", None)
    except KeyError:
        return None
    return None if count is None else int(count)
