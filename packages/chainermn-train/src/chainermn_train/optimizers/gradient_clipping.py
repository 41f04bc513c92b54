"""Gradient clipping of models in parts, and the refusal of hooks that see a rank's part alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from chainer.optimizer_hooks import GradientClipping, GradientLARS

from chainermn_comm import CommunicationError, CommunicatorBase, global_norm

from ..collective_errors import allgather_checked, require_communicator
from .gradient_set import multiply_gradients

# What becomes of an update.
STEP = "a step"
NO_STEP = "no step"
START_AGAIN = "it failed, or rank 0's state went to all"


class StartAgainError(CommunicationError):
    """Of the ranks that hold a model together some step and others don't.

    All of them drop their gradients then, and make no step.
    """


class MultiNodeGradientClipping:
    """An optimizer hook that scales gradients down to a threshold, over all parts of a model.

    It does what ``chainer.optimizer_hooks.GradientClipping`` does in one process that
    holds the whole model: the norm is that of all gradients, each counted once, whether
    ranks hold a parameter in shards, as replicas, or on one rank alone::

        optimizer.add_hook(chainermn.MultiNodeGradientClipping(1.0, comm))

    It may be a hook of a Chainer optimizer and of a multi-node optimizer. Calling it is
    collective: all ranks of ``comm`` step in the same updates. Under a multi-node
    optimizer none of them steps in an update that fails, or makes no step, on some.

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
        # Whether the other ranks wait for this one to call the hook, or to say why not.
        self._is_due = False

    def __call__(self, optimizer: Any) -> None:
        """Scale the gradients of the optimizer's model (collective).

        Raises:
            ValueError: on all ranks, if some rank of a parameter's group isn't in
                ``comm``.
        """
        self._meet(STEP)
        norm = global_norm(self.comm, optimizer.target)
        if norm <= self.threshold:
            return
        # A norm that is no number makes all gradients so, as in Chainer.
        multiply_gradients(optimizer.target.params(), self.threshold / norm)

    def _meet(self, outcome: str) -> None:
        """Tell the other ranks what becomes of this rank's update, and hear it (collective).

        Raises:
            StartAgainError: other ranks have another outcome.
        """
        self._is_due = False
        outcomes = allgather_checked(self.comm, self.name, lambda: outcome)
        if len(set(outcomes)) > 1:
            raise StartAgainError


@contextmanager
def meeting_in_hooks(optimizer: Any) -> Iterator[None]:
    """Let the block be an update that meets the ranks of each clipping hook once (collective).

    The ranks of a hook, which hold other parts of the model, are not those of the
    optimizer. They would wait in the hook if this rank didn't come to call it.

    Raises:
        StartAgainError: the ranks of a hook don't all step, and this one should.
    """
    hooks = _hooks_of(optimizer)
    hooks = [each for each in hooks if isinstance(each, MultiNodeGradientClipping)]
    for hook in hooks:
        hook._is_due = True
    try:
        yield
        for hook in hooks:
            if hook._is_due:
                hook._meet(NO_STEP)
    except BaseException:
        for hook in hooks:
            if hook._is_due:
                with suppress(CommunicationError):
                    hook._meet(START_AGAIN)
        raise


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
