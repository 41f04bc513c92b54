"""Gradient clipping of models in parts, and the refusal of hooks that see a rank's part alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer.optimizer_hooks import GradientClipping, GradientLARS

from chainermn_comm import CommunicatorBase, RankMismatchError, global_norm
from chainermn_comm.errors import share_failure

from ..collective_errors import require_communicator
from .gradient_set import multiply_gradients

# The outcome of an update that shares rank 0's state; others are a step, or no step.
START_AGAIN = "rank 0's state for all"

_STEPS = (
    "the number of steps (t) of the ranks that hold a model together (load the same "
    "checkpoint on all of them, and let an error of one rank end the job)"
)

_CANT_SKIP = (
    "Chainer's optimizer would step here in an update in which other ranks of the model don't: "
    "use create_multi_node_optimizer on all ranks (its communicator may have one rank)"
)


class StartAgainError(Exception):
    """An update makes no step; gradients that were added up, or are in flight, are dropped."""


class MultiNodeGradientClipping:
    """An optimizer hook that scales gradients down to a threshold, over all parts of a model.

    The hook does what ``chainer.optimizer_hooks.GradientClipping`` does in one process
    that holds the whole model. The norm counts each gradient once, whether ranks hold a
    parameter in shards, as replicas, or on one rank alone::

        optimizer.add_hook(chainermn.MultiNodeGradientClipping(1.0, comm))

    It works with a Chainer optimizer and with a multi-node optimizer. The hook is
    collective, so all ranks of ``comm`` must step in the same updates. With multi-node
    optimizers, no rank steps in an update in which some ranks can't, such as when rank
    0's state is given to all. If another hook fails on one rank, all ranks raise. Any
    other error of one rank should end the job, because ranks that hold other parts of
    the model wait in the hook for that rank.

    Args:
        threshold: the largest norm that gradients keep, the same on all ranks. With a
            loss scale, the norm of the scaled gradients is compared with it, as in
            Chainer.
        comm: a communicator whose ranks together hold the whole model, once or several
            times. The ranks that hold the same shard, over which a multi-node optimizer
            averages, are not enough.

    Raises:
        TypeError: ``comm`` is not a communicator, or ``threshold`` is no number.
    """

    name = "MultiNodeGradientClipping"
    call_for_each_param = False
    timing = "pre"

    def __init__(self, threshold: float, comm: CommunicatorBase) -> None:
        self.threshold = float(threshold)
        self.comm = require_communicator(comm, type(self).__name__)
        self._error: Any = None  # see `starts_again`

    def __call__(self, optimizer: Any) -> None:
        """Scale the gradients of the optimizer's model (collective).

        Raises:
            ValueError: a rank of a parameter's group isn't in ``comm``; raised on all
                ranks.
            RankMismatchError: ranks have made different numbers of steps, or have
                different thresholds; raised on all ranks.
        """
        self._meet("a step", optimizer)
        norm = global_norm(self.comm, optimizer.target)
        if norm <= self.threshold:
            return
        # A norm that is no number makes all gradients so, as in Chainer.
        multiply_gradients(optimizer.target.params(), self.threshold / norm)

    def _meet(self, outcome: str, optimizer: Any) -> None:
        """Tell what becomes of this rank's update (collective).

        Raises:
            RankMismatchError: on all ranks, if they have made different numbers of
                steps, or have different thresholds.
            StartAgainError: on all ranks, if they differ in what becomes of it; ranks
                with Chainer's optimizer raise RankMismatchError instead.
        """
        error = self._error
        self._error = None
        rows = self.comm.handshake(
            self.name,
            ((_STEPS, optimizer.t), ("threshold", self.threshold)),
            payload=outcome.encode(),
        )
        if len(set(rows)) > 1:
            raise error or RankMismatchError(_CANT_SKIP)


def starts_again(optimizer: Any, update: Callable[[], None]) -> bool:
    """Make an update that meets the ranks of certain hooks once (collective).

    The ranks of such a hook, which hold other parts of the model, are not those of the
    optimizer. They would wait in the hook if this rank made no step and told them
    nothing. The hooks are :class:`MultiNodeGradientClipping`, and that of
    ``share_loss_scale`` in another package. They have a method ``_meet``, and an
    attribute ``_error``: what ``_meet`` raises if ranks differ. It is None once they have
    met in this update, and under Chainer's optimizers.

    Returns:
        Whether the update has raised StartAgainError, or other ranks of a hook step and
        this one doesn't. This rank, and they, must drop their gradients.
    """
    hooks = [each for each in _hooks_of(optimizer) if hasattr(each, "_meet")]
    for hook in hooks:
        hook._error = StartAgainError
    outcome = "no step"
    try:
        update()
    except StartAgainError:
        outcome = START_AGAIN
    for hook in hooks:
        if hook._error:
            try:
                hook._meet(outcome, optimizer)
            except StartAgainError:
                outcome = START_AGAIN
    return outcome == START_AGAIN


def tell_waiting_ranks(optimizer: Any, error: BaseException) -> None:
    """Raise PeerError on the ranks that wait in a clipping hook for this rank's step (collective).

    The hook of ``share_loss_scale`` needs no such call: no hook is called before it.
    """
    for hook in _hooks_of(optimizer):
        if isinstance(hook, MultiNodeGradientClipping) and hook._error:
            share_failure(hook.comm.handshake, hook.name, error)


def refuse_hooks_by_norm(optimizer: Any, parts: list[tuple[str, Any]]) -> None:
    """Raise ValueError if a hook of Chainer's takes the norm of only a part of the model.

    ``parts`` are the names and parameters of which this rank holds only a part.
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
    """Return the hooks of an optimizer or update rule of Chainer; of others an empty list."""
    hookable = getattr(owner, "_hookable", None)
    if hookable is None:
        return []
    return [
        *hookable._pre_update_hooks.values(),
        *hookable._post_update_hooks.values(),
    ]
