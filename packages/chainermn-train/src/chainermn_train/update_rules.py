"""Loads the state of an optimizer whose parameters have not all been updated yet."""

from __future__ import annotations

from typing import Any

import chainer


def serialize_optimizer(optimizer: Any, serializer: Any) -> None:
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
