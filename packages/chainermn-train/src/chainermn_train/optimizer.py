"""The multi-node optimizer: a Chainer optimizer that steps along the mean gradient of all ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np

from chainermn_comm import CommunicatorBase

from .agreement import gather_or_raise, require_communicator
from .copying import SharesCommunicator


def create_multi_node_optimizer(
    actual_optimizer: Any,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
) -> MultiNodeOptimizer:
    """Make a Chainer optimizer work on all ranks at once.

    Ranks may start from different weights, but the optimizer's own state (momenta, Adam's
    moments, ``t``) and its hyperparameters must be equal on all ranks: only gradients and
    parameters are exchanged. A state that is loaded on one rank alone is not noticed, and
    parameters then drift apart; load it on every rank.

    Args:
        actual_optimizer: a Chainer optimizer, set up or not.
        communicator: the ranks that train together.
        double_buffering: must be False in this version.
        zero_fill: count a gradient that a rank doesn't have (None) as zeros. Without it
            ranks must agree on which gradients are missing.

    Returns:
        An optimizer that is used like ``actual_optimizer``; see :class:`MultiNodeOptimizer`.

    Raises:
        TypeError: an argument is not an optimizer or not a communicator.
        NotImplementedError: ``double_buffering`` is true.
    """
    require_communicator(communicator, "create_multi_node_optimizer")
    if isinstance(actual_optimizer, MultiNodeOptimizer):
        raise TypeError("the optimizer is already a multi-node optimizer; pass it on as it is")
    if not isinstance(actual_optimizer, chainer.Optimizer):
        raise TypeError(
            "create_multi_node_optimizer needs a Chainer optimizer, such as "
            f"chainer.optimizers.Adam(), not {type(actual_optimizer).__name__}"
        )
    if double_buffering:
        raise NotImplementedError(
            "double_buffering=True comes with a later version of chainermn-train; "
            "leave it out (or False) in this one"
        )
    return MultiNodeOptimizer(actual_optimizer, communicator, zero_fill)


class MultiNodeOptimizer(SharesCommunicator):
    """A Chainer optimizer whose :meth:`update` steps along the mean gradient of all ranks.

    Every other attribute and method is that of ``actual_optimizer``, to read and to set:
    hyperparameters, hooks, ``target``, ``t``, ``serialize`` and so on. Hooks therefore
    see the mean gradient.

    It is not a subclass of :class:`chainer.Optimizer`, whose class attributes would hide
    the actual optimizer's; Chainer's updaters, extensions and serializers don't ask for one.

    A copy, shallow or deep, has the same communicator. It can't be pickled (TypeError).

    Attributes:
        actual_optimizer: the optimizer that steps.
        communicator: the ranks that train together.
        zero_fill: whether a missing gradient counts as zeros.
    """

    _OWN = frozenset({"actual_optimizer", "communicator", "zero_fill", "_synchronized"})

    def __init__(
        self, actual_optimizer: Any, communicator: CommunicatorBase, zero_fill: bool
    ) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.zero_fill = zero_fill
        # The parameters that were initialised at the last broadcast. They are kept, not
        # their ids: a new parameter may be given the id of one that is gone.
        self._synchronized: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        # An own attribute is missing only while the object is being copied.
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.actual_optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._OWN:
            raise AttributeError(f"{name!r} of a multi-node optimizer can't be deleted")
        delattr(self.actual_optimizer, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.actual_optimizer)})

    def setup(self, link: Any) -> MultiNodeOptimizer:
        """Set the model to train, as :meth:`chainer.Optimizer.setup` does; returns itself."""
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """Update the parameters with the mean of all ranks' gradients (collective).

        Ranks may start from different weights, and may initialise, add or replace
        parameters later. Whenever the set of initialised parameters has changed on any
        rank since the last call, all ranks get rank 0's parameters. That happens before
        ``lossfun`` is called if every rank gave one and has all its parameters
        initialised: nothing is lost then. Otherwise the gradients belong to parameters
        that ranks didn't share, so the call broadcasts the parameters and *does not step*
        (``t`` stays): so with lazily initialised links, such as ``L.Linear(None, 10)``,
        the first call does, and so does the first call without a loss function.

        A rank that has no examples can take part by calling ``target.cleargrads()``
        and then ``update()``: its gradients count as zeros (if ``zero_fill``).

        Args:
            lossfun: called with ``args`` and ``kwds``; the gradients of the variable that
                it returns are computed. None if the gradients are there already.
            args: arguments of ``lossfun``.
            kwds: keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: :meth:`setup` has not been called on this rank
                (a :class:`~chainermn_comm.errors.PeerError` on the others).
            Exception: whatever ``lossfun`` or its backward raises on this rank (a
                :class:`~chainermn_comm.errors.PeerError` that names the rank on the others).
                No rank steps then, and all may go on with the next update.
        """
        changed, incomplete, without_loss = self._agree_on_parameters(lossfun is None)
        if changed and not incomplete and not without_loss:
            self._broadcast()
            changed = False
        if without_loss < self.communicator.size:
            self._compute_gradients_or_raise(lossfun, args, kwds)
        if incomplete and not changed:  # the loss may have initialised what was missing
            changed, incomplete, _ = self._agree_on_parameters(False)
        if changed:
            self._initialize_as_others_did()
            self._broadcast()
            return
        self._scale_missing_gradients()
        self.communicator.multi_node_mean_grad(self.actual_optimizer.target, self.zero_fill)
        self.actual_optimizer.update()

    def assume_synchronized(self) -> None:
        """Say that all ranks have the same parameters: the next update won't broadcast them.

        For who loads them on every rank and has made sure that they are equal, as
        ``maybe_load`` of a checkpointer does. Not collective; if a rank doesn't say so, the
        next update broadcasts all the same.
        """
        target = self.actual_optimizer.target
        self._synchronized = [param for param in target.params() if param.is_initialized]

    def _agree_on_parameters(self, without_loss: bool) -> tuple[bool, bool, int]:
        """Whether on any rank parameters have changed, or some are not initialised (collective).

        Also the number of ranks without a loss function. One sum of four integers, since it
        is part of every update.
        """
        target = self.actual_optimizer.target
        params = [] if target is None else list(target.params())
        ready = [param for param in params if param.is_initialized]
        old = self._synchronized
        changed = old is None or len(old) != len(ready) or not all(map(operator.is_, old, ready))
        total = self._count(changed, len(ready) < len(params), without_loss, target is None)
        if total[3]:
            error = RuntimeError("the optimizer has no model: call its `setup(model)` first")
            gather_or_raise(self.communicator, error if target is None else None)
        return bool(total[0]), bool(total[1]), int(total[2])

    def _count(self, *flags: bool) -> Any:
        """On how many ranks each flag is true: int64 of shape (len(flags),) (collective)."""
        return self.communicator.allreduce(np.array(flags, dtype=np.int64))

    def _compute_gradients_or_raise(
        self, lossfun: Callable[..., Any] | None, args: Any, kwds: Any
    ) -> None:
        """Compute the gradients where there is a loss function; raise where any fails (collective).

        The error stays in its own rank until all know of it: else a caller that catches it,
        to skip a batch, would be one collective call ahead of the other ranks.
        """
        error: Exception | None = None
        if lossfun is not None:
            try:
                self._compute_gradients(lossfun, args, kwds)
            except Exception as exception:
                error = exception
        try:
            if self._count(error is not None)[0]:
                gather_or_raise(self.communicator, error)
        finally:
            del error  # else a cycle through its traceback would keep the batch's memory

    def _compute_gradients(self, lossfun: Callable[..., Any], args: Any, kwds: Any) -> None:
        """What :meth:`chainer.GradientMethod.update` does before it steps."""
        optimizer = self.actual_optimizer
        loss = lossfun(*args, **kwds)
        if getattr(optimizer, "_use_cleargrads", True):
            optimizer.target.cleargrads()
        else:
            optimizer.target.zerograds()
        loss.backward(loss_scale=optimizer._loss_scale)

    def _scale_missing_gradients(self) -> None:
        """Make the step undo the loss scale also where backward met no gradient here.

        Chainer notes the scale in each parameter that backward meets. One that it met on
        other ranks only would get their scaled mean, and keep the scale in it.
        """
        scale = self.actual_optimizer._loss_scale
        if scale is not None:
            for param in self.actual_optimizer.target.params():
                if param.grad is None:
                    param._loss_scale = scale

    def _initialize_as_others_did(self) -> None:
        """Initialise the parameters whose shapes only other ranks have learnt (collective).

        Any rank, rank 0 too, may be the one without examples.
        """
        named = list(self.actual_optimizer.target.namedparams())
        known = {name: param.shape for name, param in named if param.is_initialized}
        shapes: dict[str, tuple[int, ...]] = {}
        for others in gather_or_raise(self.communicator, None, known):
            shapes = others | shapes
        error = None
        try:
            for name, param in named:
                if not param.is_initialized and name in shapes:
                    param.initialize(shapes[name])
        except Exception as exception:
            error = exception
        gather_or_raise(self.communicator, error)

    def _broadcast(self) -> None:
        """Give rank 0's parameters to all ranks (collective)."""
        self.communicator.bcast_data(self.actual_optimizer.target)
        self.assume_synchronized()
