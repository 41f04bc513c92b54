"""Dynamic loss scaling of a model that spans ranks: one scale, and one decision to step."""

from __future__ import annotations

import sys
import traceback
from functools import partial
from typing import Any

import chainer

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import raise_together

from .functions import check_communicator

_NAME = "share_loss_scale"
_SCALING = ("_loss_scale", "_loss_scaling_multiplier", "_loss_scaling_isnan_ever")


def share_loss_scale(optimizer: Any, communicator: CommunicatorBase) -> None:
    """Let all ranks of a model scale their losses alike, and skip the same steps (collective).

    Chainer's ``loss_scaling()`` halves the scale and skips the step if a gradient of this
    rank isn't finite. After this call all ranks do so if a gradient of any rank isn't
    finite, whether parameters are replicated, split or placed. So the gradients that ranks
    exchange have the same scale::

        optimizer.setup(model)
        optimizer.loss_scaling()
        chainermn.share_loss_scale(optimizer, comm)

    All ranks get rank 0's scale and interval. From then on each step is collective: a
    hook named ``share_loss_scale`` runs before all other hooks, and all ranks have to
    step in the same updates. Call the function again after ``setup``, which removes the
    hook; after ``loss_scaling``; and after loading a snapshot, because only snapshots of
    multi-node optimizers hold the scale. If a step failed on some ranks, call it too,
    after a multi-node optimizer's ``synchronize``.

    Args:
        optimizer: an optimizer of Chainer, or one that
            :func:`create_multi_node_optimizer` returned.
        communicator: the communicator of all ranks that hold parts of the model, or
            replicas of them.

    Raises:
        TypeError: ``communicator`` is no communicator; raised on this rank only.
        RuntimeError: ``setup`` has not been called on this rank; PeerError on the
            others.
        ValueError: this rank's optimizer doesn't scale dynamically, or it is a
            multi-node optimizer with parameters that are not initialised, so that its
            first update wouldn't step; PeerError on the others.
        RankMismatchError: on all ranks, by ``update``, when their scales differ.
    """
    communicator = check_communicator(communicator, "communicator")
    with raise_together(communicator.handshake, _NAME):
        own = _check_scaling(optimizer, communicator.rank)
    for name, value in zip(_SCALING, communicator.bcast_obj(own), strict=True):
        setattr(optimizer, name, value)
    hooks = optimizer._hookable._pre_update_hooks
    hooks[_NAME] = partial(_share_overflow, communicator)
    hooks.move_to_end(_NAME, last=False)  # before hooks that may fail on some ranks


def _check_scaling(optimizer: Any, rank: int) -> list[Any]:
    """Return the settings of the scale; raise if the optimizer can't share one."""
    if optimizer._hookable is None:
        raise RuntimeError(
            f"rank {rank}: the optimizer has no model: call its setup(model) first"
        )
    if not optimizer._loss_scaling_is_dynamic:
        raise ValueError(
            f"rank {rank}: the optimizer doesn't scale losses dynamically: call its loss_scaling() "
            "first, on all ranks"
        )
    if not isinstance(optimizer, chainer.Optimizer):
        for name, param in optimizer.target.namedparams():
            if not param.is_initialized:
                raise ValueError(
                    f"rank {rank}: {name} is not initialised: give its input size"
                )
    return [getattr(optimizer, name) for name in _SCALING]


def _share_overflow(communicator: CommunicatorBase, optimizer: Any) -> None:
    """Let no rank step if a gradient of some rank isn't finite; Chainer has checked this rank."""
    scale = ("the loss scale (call share_loss_scale again)", optimizer._loss_scale)
    overflowed = bytes([optimizer._loss_scaling_isnan])
    if b"\1" in communicator.handshake(_NAME, (scale,), payload=overflowed):
        optimizer._loss_scaling_isnan = optimizer._loss_scaling_isnan_ever = True


def refuse_unshared_scale(rank: int) -> None:
    """Raise if an optimizer that adapts a loss scale for this rank alone is in its update."""
    # A link doesn't know its optimizer, nor the link that contains it. But the
    # optimizer's `update` is among the calls that led here.
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name != "update":
            continue
        optimizer: Any = frame.f_locals.get("self")
        if getattr(optimizer, "_loss_scaling_is_dynamic", None) is not True:
            continue
        if _NAME in optimizer._hookable._pre_update_hooks:
            return
        raise RuntimeError(
            f"rank {rank}: the optimizer adapts a loss scale of this rank's own, so gradients of "
            "different scales would meet: after its loss_scaling(), call "
            "chainermn.share_loss_scale(optimizer, communicator) on all ranks; or give all one "
            "scale with set_loss_scale() instead"
        )
