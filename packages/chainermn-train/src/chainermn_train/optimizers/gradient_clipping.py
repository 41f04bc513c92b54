"""Gradient clipping of models in parts, and the refusal of hooks that see a rank's part alone."""

from __future__ import annotations

from typing import Any

from chainer.optimizer_hooks import GradientClipping, GradientLARS

from chainermn_comm import CommunicatorBase, global_norm

from ..collective_errors import require_communicator
from .gradient_set import multiply_gradients


class MultiNodeGradientClipping:
    """An optimizer hook that scales gradients down to a threshold, over all parts of a model.

    It does what ``chainer.optimizer_hooks.GradientClipping`` does in one process that
    holds the whole model: the norm is that of all gradients, each counted once, whether
    ranks hold a parameter in shards, as replicas, or on one rank alone::

        optimizer.add_hook(chainermn.MultiNodeGradientClipping(1.0, comm))

    It may be a hook of a Chainer optimizer and of a multi-node optimizer. Calling it is
    collective: all ranks of ``comm`` step in the same updates.

    Args:
        threshold: the greatest norm that gradients keep, the same on all ranks.
        comm: the ranks that hold the whole model together, once or several times: not
            those with the same shards, over which a multi-node optimizer averages.

    Raises:
        TypeError: ``comm`` is not a communicator.
    """

    name = "MultiNodeGradientClipping"
    call_for_each_param = False
    timing = "pre"

    def __init__(self, threshold: float, comm: CommunicatorBase) -> None:
        self.threshold = threshold
        self.comm = require_communicator(comm, type(self).__name__)

    def __call__(self, optimizer: Any) -> None:
        """Scale the gradients of the optimizer's model (collective).

        Raises:
            ValueError: on all ranks, if some rank of a parameter's group isn't in
                ``comm``.
        """
        norm = global_norm(self.comm, optimizer.target)
        if norm <= self.threshold:
            return
        # A norm that is no number makes all gradients so, as in Chainer.
        multiply_gradients(optimizer.target.params(), self.threshold / norm)


def refuse_hooks_by_norm(optimizer: Any, parts: list[tuple[str, Any]]) -> None:
    """Raise ValueError if a hook of Chainer's takes a norm over a part of the model alone.

    ``parts`` are the parameters, with their names, of which other ranks hold the rest.
    """
    for name, param in parts:
        is_shard = any(each.kind == "shard" for each in param.shardings)
        for hook in [*_hooks_of(optimizer), *_hooks_of(param.update_rule)]:
            sees_a_part = is_shard and isinstance(hook, GradientLARS)
            if sees_a_part or isinstance(hook, GradientClipping):
                raise ValueError(
                    f"the hook {type(hook).__name__} takes the norm of this rank's part of the "
                    f"model, of which other ranks hold the rest (of {name}, for one), so each "
                    "rank would scale gradients differently: remove the hook; to clip by the "
                    "norm of the whole model add "
                    "chainermn.MultiNodeGradientClipping(threshold, comm)"
                )


def _hooks_of(owner: Any) -> list[Any]:
    """Return the hooks before steps of an optimizer or rule; none of one that isn't Chainer's."""
    hookable = getattr(owner, "_hookable", None)
    return list(getattr(hookable, "_pre_update_hooks", {}).values())
