"""The class of multi-node optimizers in ChainerMN 1.x, from which programs derive their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from ..collective_errors import allgather_checked, require_communicator
from ..wrappers import AttributeProxy
from .agreement import OPERATION
from .divided_model import refuse_divided


class _MultiNodeOptimizer(AttributeProxy):
    """A Chainer optimizer whose :meth:`update` takes the mean of all ranks' gradients.

    Its own attributes are ``actual_optimizer``, ``communicator``, ``zero_fill`` and
    ``target_params``; every other one is that of ``actual_optimizer``, to read and to
    set. A subclass may override any method. :func:`create_multi_node_optimizer` makes
    a :class:`MultiNodeOptimizer`, which does more, and steps in its first update, too.
    """

    _OWN = frozenset({"actual_optimizer", "communicator", "target_params", "zero_fill"})
    _ACTUAL = "actual_optimizer"

    def __init__(
        self, actual_optimizer: Any, communicator: Any, zero_fill: bool = True
    ) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator  # checked by an update
        self.zero_fill = zero_fill
        # Names, and whether there are values, at the last update.
        self.target_params: list[tuple[str, bool]] = []

    def setup(self, link: Any) -> Self:
        """Set the model, ``link``, and return itself.

        ValueError is raised if ranks of the communicator hold the model in parts.
        """
        refuse_divided(link, self.communicator)
        self.actual_optimizer.setup(link)
        self.target_params = []
        return self

    def update(
        self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any
    ) -> None:
        """Step along the mean of all ranks' gradients (collective).

        If :meth:`is_changed` is true on any rank, all get rank 0's parameters instead. If
        ``lossfun`` raises on one rank, all ranks raise.
        """
        target = self.target
        communicator = require_communicator(self.communicator, type(self).__name__)

        def compute_gradients() -> bool:
            if lossfun is not None:
                loss = lossfun(*args, **kwds)
                target.cleargrads()
                loss.backward(loss_scale=getattr(self, "_loss_scale", None))
            return self.is_changed(target)

        if any(allgather_checked(communicator, OPERATION, compute_gradients)):
            communicator.bcast_data(target)
        else:
            communicator.multi_node_mean_grad(target, self.zero_fill)
            self.actual_optimizer.update(None)

    def is_changed(self, target: Any) -> bool:
        """Return whether parameters were added or got values since the last call."""
        before = self.target_params
        self.target_params = [
            (name, param.is_initialized) for name, param in sorted(target.namedparams())
        ]
        return self.target_params != before
