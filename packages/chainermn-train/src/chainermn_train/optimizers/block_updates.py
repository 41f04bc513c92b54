"""Steps of Chainer's update rules in blocks: temporaries stay in the cache of the processor."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from functools import partial
from typing import Any

import chainer
import numpy as np
from chainer.optimizers import ada_grad, adam, momentum_sgd, nesterov_ag, rmsprop

from ..slots import has_elements

# Chainer computes each element by itself in these rules, so that blocks change no bit.
# Blocks don't make SGD faster, which has one temporary.
RULES = frozenset(
    {
        ada_grad.AdaGradRule,
        adam.AdamRule,
        momentum_sgd.MomentumSGDRule,
        nesterov_ag.NesterovAGRule,
        rmsprop.RMSpropRule,
    }
)
# Elements of a block: Adam has eight arrays of float32 under way, as large as a cache of
# 2 MiB. Smaller blocks make MomentumSGD slower than Chainer's own step.
BLOCK_SIZE = 64 << 10


def step_in_blocks(optimizer: Any, params: Iterable[Any]) -> None:
    """Step along the present gradients; the rules of large parameters on CPUs do it in blocks.

    Each block is computed by the rule's own method, so all bits are the same. Without
    blocks, temporaries as large as the parameter go through memory. A rule of another
    class, or one that the user has changed, steps as ever.
    """
    rules = [param.update_rule for param in params if _is_suitable(param)]
    for rule in rules:
        rule.update_core_cpu = partial(_update_in_blocks, rule)
    try:
        optimizer.update(None)
    finally:
        for rule in rules:  # a rule of two parameters comes twice
            vars(rule).pop("update_core_cpu", None)


def _is_suitable(param: Any) -> bool:
    array = param.array
    if type(array) is not np.ndarray or array.size <= BLOCK_SIZE:
        return False
    rule = param.update_rule
    if type(rule) not in RULES or "update_core_cpu" in vars(rule):
        return False
    # A hyperparameter may have a value of its own for each element.
    return not any(map(has_elements, rule.hyperparam.get_dict().values()))


def _update_in_blocks(rule: Any, param: Any) -> None:
    """Do what the rule's class does in ``update_core_cpu``."""
    update = type(rule).update_core_cpu
    arrays = [param.array, param.grad, *rule.state.values()]
    for array in arrays:
        # All must have the same elements, in one order that a view can have.
        if (
            type(array) is not np.ndarray
            or array.shape != param.shape
            or not array.flags.c_contiguous
        ):
            update(rule, param)
            return
    flat_param, flat_grad, *flat_states = [array.reshape(-1) for array in arrays]
    rule_of_block = copy(rule)
    for start in range(0, flat_param.size, BLOCK_SIZE):
        part = slice(start, start + BLOCK_SIZE)
        states = [state[part] for state in flat_states]
        rule_of_block._state = dict(zip(rule.state, states, strict=True))
        block = chainer.Variable(flat_param[part])
        block.grad = flat_grad[part]
        update(rule_of_block, block)
