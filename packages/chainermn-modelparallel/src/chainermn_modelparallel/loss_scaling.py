"""Dynamic loss scaling of a model that spans ranks: one scale, and one decision to step."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from typing import Any

from chainermn_comm import CommunicatorBase, RankMismatchError
from chainermn_comm.errors import raise_together

from .functions import check_communicator

_NAME = "share_loss_scale"
_SCALING = ("_loss_scale", "_loss_scaling_multiplier", "_loss_scaling_isnan_ever")
_CANT_SKIP = (
    "Chainer's optimizer would step here in an update in which other ranks of the model don't: "
    "use create_multi_node_optimizer on all ranks (its communicator may have one rank)"
)


def share_loss_scale(optimizer: Any, communicator: CommunicatorBase) -> None:
    """Let all ranks of a model scale their losses alike, and skip the same steps (collective).

    Chainer's ``loss_scaling()`` halves the scale and skips the step if a gradient of this
    rank isn't finite. After this call, all ranks do so if a gradient of any rank isn't
    finite, whether ranks hold parameters as replicas, in shards or alone. So the
    gradients that ranks exchange have the same scale::

        optimizer.setup(model)
        optimizer.loss_scaling()
        chainermn.share_loss_scale(optimizer, comm)

    All ranks get rank 0's scale and interval. From then on each step is collective: a
    hook named ``share_loss_scale`` runs before all other hooks, and all ranks must step
    in the same updates. With multi-node optimizers, no rank steps in an update in which
    some ranks can't, such as when rank 0's state is given to all.

    Call the function again after ``setup``, which removes the hook; after
    ``loss_scaling``; after loading a snapshot, because only snapshots of multi-node
    optimizers hold the scale; and if a step has failed on some ranks, after a
    multi-node optimizer's ``synchronize``.

    Args:
        optimizer: an optimizer of Chainer or a multi-node optimizer.
        communicator: a communicator of all ranks that hold the model, in parts or as
            replicas.

    Raises:
        TypeError: ``communicator`` is no communicator; raised on this rank alone.
        RuntimeError: ``setup`` has not been called on this rank (PeerError on the other
            ranks).
        ValueError: this rank's optimizer doesn't scale dynamically (PeerError on the
            other ranks).
        RankMismatchError: scales differ between ranks; raised on all ranks by
            ``update``.
    """
    communicator = check_communicator(communicator, "communicator")
    with raise_together(communicator.handshake, _NAME):
        if optimizer._hookable is None:
            raise RuntimeError(
                f"rank {communicator.rank}: the optimizer has no model: call its setup(model) first"
            )
        if not optimizer._loss_scaling_is_dynamic:
            raise ValueError(
                f"rank {communicator.rank}: the optimizer doesn't scale losses dynamically: call "
                "its loss_scaling() first, on all ranks"
            )
    for name in _SCALING:
        setattr(optimizer, name, communicator.bcast_obj(getattr(optimizer, name)))
    optimizer._loss_scaling_isnan = False  # Chainer sets it when a step begins
    hooks = optimizer._hookable._pre_update_hooks
    hooks[_NAME] = _ShareOverflow(communicator)
    hooks.move_to_end(_NAME, last=False)  # before hooks that may fail on some ranks


@dataclass
class _ShareOverflow:
    """The hook; multi-node optimizers know it by its method ``_meet``.

    Attributes:
        communicator: the ranks that share a scale.
        _error: the error that ``_meet`` raises if other ranks don't step. A multi-node
            optimizer sets it at the beginning of an update. If it is still set at the end,
            the optimizer calls ``_meet``. With Chainer's optimizer it is None, and
            ``_meet`` raises RankMismatchError.
    """

    communicator: CommunicatorBase
    _error: Any = None

    def __call__(self, optimizer: Any) -> None:
        """Let no rank step if a gradient of some rank isn't finite (collective)."""
        self._meet("a step", optimizer)

    def _meet(self, outcome: str, optimizer: Any) -> None:
        """Tell the outcome of this rank's update; raise the error if ranks differ (collective)."""
        error = self._error
        self._error = None
        scale = ("the loss scale (call share_loss_scale again)", optimizer._loss_scale)
        # Chainer has looked at this rank's gradients.
        own = bytes([optimizer._loss_scaling_isnan]) + outcome.encode()
        rows = self.communicator.handshake(_NAME, (scale,), payload=own)
        if max(rows)[0]:  # the byte of some rank is 1
            optimizer._loss_scaling_isnan = optimizer._loss_scaling_isnan_ever = True
        if len({row[1:] for row in rows}) > 1:
            raise error or RankMismatchError(_CANT_SKIP)


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
