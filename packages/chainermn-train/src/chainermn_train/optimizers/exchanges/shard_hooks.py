"""Which rules and hooks can step parts of parameters, and hooks that take a norm of all parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import numpy as np
from chainer import GradientMethod
from chainer.optimizer_hooks import (
    GradientClipping,
    GradientHardClipping,
    Lasso,
    WeightDecay,
)

from chainermn_comm import CommunicatorBase, global_norm

from ...slots import Facts, has_elements, numbers_of
from ..agreement import OPERATION
from ..divided_model import common_ranks
from ..gradient_clipping import MultiNodeGradientClipping
from ..parameter_set import ParameterSet

# Hooks that compute each element by itself, by the function that does so.
_BY_ELEMENT = frozenset(
    {WeightDecay.__call__, Lasso.__call__, GradientHardClipping.__call__}
)


def checked_hooks(optimizer: Any, params: ParameterSet) -> Facts:
    """Return the numbers of all hooks, which must be equal on all ranks.

    ValueError if steps of parts of parameters wouldn't be those of whole parameters.
    """
    if getattr(type(optimizer), "update", None) is not GradientMethod.update:
        raise ValueError(
            f"{type(optimizer).__name__} has an update() of its own, which may need whole "
            "parameters: use sharded=False"
        )
    _checked(optimizer._hookable._post_update_hooks, ())
    facts = {
        "hooks": _checked(
            optimizer._hookable._pre_update_hooks, {*_BY_ELEMENT, *_BY_NORM}
        )
    }
    for name, param in params.namedparams():
        rule = param.update_rule
        if rule is not None:
            _check_rule(rule)
            own = rule._hookable
            hooks = {**own._pre_update_hooks, **own._post_update_hooks}
            facts[f"hooks of {name}"] = _checked(hooks, _BY_ELEMENT)
    return facts


def _checked(hooks: dict[str, Any], known: Collection[Any]) -> Facts:
    for name, hook in hooks.items():
        if type(hook).__call__ not in known:
            raise ValueError(
                f"the hook {name!r} ({type(hook).__name__}) may need whole parameters and "
                "gradients, of which each rank has a part: use sharded=False; these hooks, called "
                "before the step, are known to need parts alone: WeightDecay, Lasso, "
                "GradientHardClipping, GradientClipping, MultiNodeGradientClipping"
            )
    return {name: numbers_of(hook) for name, hook in hooks.items()}


def _check_rule(rule: Any) -> None:
    # The class has to say it itself: one that is derived may do more.
    is_by_element = vars(type(rule)).get("is_elementwise", False)
    if not is_by_element or any([name.startswith("update") for name in vars(rule)]):
        raise ValueError(
            f"the update rule {type(rule).__name__} doesn't say that it computes each element "
            "by itself (by the class attribute is_elementwise): use sharded=False"
        )
    for name, value in rule.hyperparam.get_dict().items():
        if has_elements(value):
            raise ValueError(
                f"the hyperparameter {name} has a value for each element of a whole parameter: "
                "use sharded=False"
            )


def hooks_of_shards(
    communicator: CommunicatorBase, optimizer: Any
) -> dict[str, Callable[..., Any]]:
    """Return the optimizer's hooks, with those by norm as they must be for parts."""
    hooks = {}
    for name, hook in optimizer._hookable._pre_update_hooks.items():
        whole = _BY_NORM.get(type(hook).__call__)
        if whole is not None:
            hook = partial(whole, communicator, hook)
        hooks[name] = hook
    return hooks


def _clip(communicator: CommunicatorBase, hook: Any, optimizer: Any) -> None:
    """Do what GradientClipping does, by the norm over all ranks' parts (collective)."""
    params = optimizer.target.params(False)
    with np.errstate(over="ignore"):  # infinite if they are too large for the dtype
        squares = sum([float(param.grad.dot(param.grad)) for param in params])
    _scale_down(communicator, hook, optimizer, squares)


def _clip_divided(communicator: CommunicatorBase, hook: Any, optimizer: Any) -> None:
    """Do what MultiNodeGradientClipping does (collective), also for its ranks."""
    if len(common_ranks(communicator, hook.comm)) > 1:
        raise ValueError(
            "MultiNodeGradientClipping has ranks in common with the optimizer, which is "
            "sharded: give it the ranks that hold other parts of the model, or use "
            "chainer.optimizer_hooks.GradientClipping"
        )
    hook._meet("a step", optimizer)
    norm = global_norm(hook.comm, optimizer.target)
    _scale_down(communicator, hook, optimizer, norm**2)


def _scale_down(
    communicator: CommunicatorBase, hook: Any, optimizer: Any, squares: float
) -> None:
    """Scale gradients to the hook's threshold; ``squares`` is of this rank's parts (collective)."""
    rows = communicator.handshake(
        OPERATION,
        (("hook", hook.name, hook.threshold),),
        payload=np.float64(squares).tobytes(),
    )
    norm = math.sqrt(sum(np.frombuffer(b"".join(rows)).tolist()))
    if norm <= hook.threshold:
        return
    # A norm that is no number makes all gradients so, as in Chainer.
    rate = hook.threshold / norm
    for param in optimizer.target.params(False):
        param.grad *= rate


# Functions that do the same with parts, given the communicator, the hook and the
# optimizer. They are collective.
_BY_NORM: dict[Any, Callable[..., None]] = {
    GradientClipping.__call__: _clip,
    MultiNodeGradientClipping.__call__: _clip_divided,
}
