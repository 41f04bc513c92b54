"""The multi-node optimizer: a Chainer optimizer that steps along the mean gradient of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import chainer

from chainermn_comm import CommunicatorBase

from ..collective_errors import SharedFailure, raise_on_all_ranks
from ..profiling import region
from ..wrappers import AttributeProxy, UnpicklableMixin
from .delayed_exchange import DelayedGradientExchange
from .detached_gradients import DetachedGradients
from .gradient_accumulator import GradientAccumulator
from .mixed_precision import (
    scale_missing_gradients,
    serialize_loss_scale,
    serialize_master_weights,
    update_rules,
)
from .parameter_synchronizer import OPERATION, ParameterSynchronizer


class MultiNodeOptimizer(AttributeProxy, UnpicklableMixin):
    """A Chainer optimizer whose :meth:`update` steps along the mean gradient of all ranks.

    Every other attribute and method is that of ``actual_optimizer``, to read and to set:
    hyperparameters, hooks, ``target``, ``t`` and so on. Hooks therefore see the mean gradient.

    It is not a subclass of :class:`chainer.Optimizer`, whose class attributes would hide
    the actual optimizer's; Chainer's updaters, extensions and serializers don't ask for one.

    A copy, shallow or deep, has the same communicator. Pickling it raises TypeError. The arguments
    are those of :func:`create_multi_node_optimizer`, which makes it and checks them; ``zero_fill``,
    ``double_buffering`` and ``accumulate_steps`` are as there. Making one is not collective.

    Attributes:
        actual_optimizer: the optimizer that steps.
        communicator: the ranks that train together.
        zero_fill: whether a missing gradient counts as zeros.
    """

    _OWN = frozenset({"actual_optimizer", "communicator", "zero_fill"})
    _OWN |= {"_synchronizer", "_accumulator", "_delayed"}
    _ACTUAL = "actual_optimizer"

    def __init__(
        self,
        actual_optimizer: Any,
        communicator: CommunicatorBase,
        zero_fill: bool,
        double_buffering: bool = False,
        accumulate_steps: int = 1,
    ) -> None:
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.zero_fill = zero_fill
        settings = {
            "double_buffering": double_buffering,
            "accumulate_steps": accumulate_steps,
            "zero_fill": zero_fill,
        }
        self._synchronizer = ParameterSynchronizer(communicator, settings)
        self._accumulator = GradientAccumulator(accumulate_steps)
        exchange = DelayedGradientExchange(communicator, zero_fill)
        self._delayed = exchange if double_buffering else None

    def setup(self, link: Any) -> MultiNodeOptimizer:
        """Set the model, ``link``, and return itself, or raise TypeError, as in Chainer."""
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

        With double buffering, the call steps along the gradients of the call before (the
        first doesn't step), each undone the loss scale it was made with, while its own are
        on their way. With ``accumulate_steps=k`` every k-th call exchanges and steps, and only
        the first and the last of k are collective. :meth:`flush` uses what is left at the end.

        Args:
            lossfun: called with ``args`` and ``kwds``; the gradients of the variable that
                it returns are computed. None if the gradients are there already.
            args: arguments of ``lossfun``.
            kwds: keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: :meth:`setup` has not been called on this rank
                (a :class:`~chainermn_comm.errors.PeerError` on the others).
            RankMismatchError: ranks have different optimizers, scale losses differently, or were
                given different ``double_buffering``, ``accumulate_steps`` or ``zero_fill``; some
                flush; or, without ``zero_fill``, not all have the same gradients (with double
                buffering the next call says so).
            BaseException: whatever ``lossfun`` or its backward raises on this rank (a
                :class:`~chainermn_comm.errors.PeerError` that names the rank on the others).
                No rank steps then, and all may go on with the next update. Between the first
                and the last of ``accumulate_steps`` calls it is raised on this rank only, and
                the others count one gradient less.
        """
        accumulator, synchronizer = self._accumulator, self._synchronizer
        optimizer = self.actual_optimizer
        backward = None if lossfun is None else partial(_backward, optimizer, lossfun, args, kwds)
        if accumulator.is_middle:
            accumulator.update(optimizer, backward)
            return
        call = f"update() after {accumulator.num_calls} updates of a step"
        changed, uninitialized, num_without_loss = synchronizer.exchange_flags(
            call, optimizer, lossfun is None
        )
        if changed and not uninitialized and not num_without_loss:
            self._broadcast()
            changed = False
        # An error stays in its own rank until all know of it: else a caller that catches it, to
        # skip a batch, would be one collective call ahead of the other ranks.
        with SharedFailure(self.communicator.handshake, OPERATION):
            if backward is not None:
                backward()
        total = 0
        if not (self._is_plain and num_without_loss == self.communicator.size):
            total = self._count_accumulated(call, self._delayed if accumulator.is_last else None)
        if uninitialized and not changed:  # the loss may have initialised what was missing
            changed, uninitialized, *_ = synchronizer.exchange_flags(call, optimizer, False)
        if changed:
            synchronizer.initialize_missing(optimizer.target)
            self._broadcast()
            return
        scale_missing_gradients(optimizer)
        if self._is_plain:
            self._exchange_and_step()
            return
        is_last = accumulator.is_last
        accumulator.add(DetachedGradients.detach_from(optimizer.target))
        if is_last:
            self._exchange((total + self.communicator.size) / self.communicator.size)

    def flush(self) -> None:
        """Use the gradients that no step has used yet (collective).

        Those in flight, with double buffering, make a step; then those that have been added up
        on any rank, if fewer than ``accumulate_steps``, make another one, along the mean of
        them all. To be called by all ranks when training ends, or at the end of an epoch
        whose examples shall all count before the next; it does nothing where nothing is left.

        Raises:
            RankMismatchError: other ranks update: they have made fewer updates, or more.
            BaseException: what made the exchange in flight fail.
        """
        total = self._count_accumulated("flush()", self._delayed)
        if self._delayed is not None:
            self._step_along(self._delayed.pop())
        if not total:
            self._accumulator.reset()
            return
        self._exchange(total / self.communicator.size)
        if self._delayed is not None:
            self.flush()

    def finalize(self) -> None:
        """Wait for the exchange in flight and free the communicator it used (collective).

        Only with double buffering there is anything to do, and only a program that makes many
        optimizers needs to. The communicator that the user gave stays theirs.
        What made the exchange fail is not raised.
        """
        if self._delayed is not None:
            self._delayed.close()

    def serialize(self, serializer: Any) -> None:
        """Save or load the optimizer's state, as :meth:`chainer.Optimizer.serialize` does.

        Beyond what Chainer saves: gradients in flight (it waits for their means, which are
        equal on all ranks) and those added up so far (each rank's own), a dynamic loss scale,
        and the float32 parameters of :meth:`use_fp32_update`. So training that resumes goes on
        with the same bits (not collective). What a snapshot of Chainer's own lacks is left out.

        Raises:
            ValueError: the snapshot holds gradients that this optimizer, with other
                ``double_buffering`` or ``accumulate_steps``, has no use for.
            BaseException: what made the exchange in flight fail.
        """
        accumulator, delayed = self._accumulator, self._delayed
        _serialize(self.actual_optimizer, serializer)
        loading = isinstance(serializer, chainer.Deserializer)
        means = None if loading or delayed is None else delayed.means()
        try:
            own = serializer["chainermn"]
            in_flight = own("in_flight", means is not None)
        except KeyError:  # Chainer's own snapshot
            accumulator.reset()
            if delayed is not None:
                delayed.put(None)
            return
        serialize_loss_scale(self.actual_optimizer, own)
        serialize_master_weights(self.target, own["masters"])
        accumulator.serialize(own["group"], self.communicator.rank, self.communicator.size)
        if in_flight:
            means = (means or DetachedGradients()).serialize(own["means"])
        if loading and delayed is not None:
            delayed.put(means)
        elif loading and means is not None:
            raise ValueError("the snapshot holds gradients in flight: use double_buffering=True")

    def assume_synchronized(self) -> None:
        """Say that all ranks have the same parameters: the next update won't broadcast them.

        For who loads them on every rank and has made sure that they are equal, as
        ``maybe_load`` of a checkpointer does. Not collective; if a rank doesn't say so, the
        next update broadcasts all the same. Before :meth:`setup` it raises AttributeError.
        """
        self._synchronizer.mark_synchronized(self.target)

    @property
    def _is_plain(self) -> bool:
        """Whether every update exchanges and uses its own gradients."""
        return self._accumulator.steps == 1 and self._delayed is None

    def _count_accumulated(self, call: str, delayed: DelayedGradientExchange | None) -> int:
        """Return how many updates' gradients all ranks hold; raise if ``delayed`` failed on any."""
        with region("communication"):
            failed = delayed is not None and delayed.wait() is not None
        count = self._accumulator.num_accumulated
        total, num_failed, *_ = self._synchronizer.sum_flags(call, count, failed, 0, 0, 0)
        if delayed is not None and num_failed:
            with raise_on_all_ranks(self.communicator, OPERATION):
                delayed.pop()
        return total

    def _exchange(self, num_per_rank: float) -> None:
        """Exchange the accumulated gradients, and step along them or those before (collective)."""
        gradients = self._accumulator.pop(self.target, num_per_rank)
        if self._delayed is None:
            gradients.assign_to(self.target)
            self._exchange_and_step()
            return
        means = self._delayed.pop()
        self._delayed.start(gradients)
        self._step_along(means)

    def _exchange_and_step(self) -> None:
        with region("communication"):
            self.communicator.multi_node_mean_grad(self.target, self.zero_fill)
        self._step()

    def _step_along(self, means: DetachedGradients | None) -> None:
        if means is not None:
            means.assign_to(self.target)
            self._step()

    def _step(self) -> None:
        try:
            self.actual_optimizer.update()
        except BaseException:  # a hook's, say; this rank may not have stepped as the others did
            self._synchronizer.invalidate()
            raise
        # It may have changed, on all ranks alike.
        self._synchronizer.mark_loss_scaling_synchronized(self.actual_optimizer)

    def _broadcast(self) -> None:
        """Give rank 0's parameters to all ranks (collective)."""
        if not self._is_plain:  # gradients of deleted parameters must not move new ones
            new = self._synchronizer.new_parameters(self.target)
            self._accumulator.discard(new)
            if self._delayed is not None:
                self._delayed.discard(new)
        self._synchronizer.broadcast(self.target)


def _backward(optimizer: Any, lossfun: Callable[..., Any], args: Any, kwds: Any) -> None:
    """Compute gradients as :meth:`chainer.GradientMethod.update` does before it steps."""
    loss = lossfun(*args, **kwds)
    if getattr(optimizer, "_use_cleargrads", True):
        optimizer.target.cleargrads()
    else:
        optimizer.target.zerograds()
    loss.backward(loss_scale=optimizer._loss_scale)


def _serialize(optimizer: Any, serializer: Any) -> None:
    """Do what :meth:`chainer.Optimizer.serialize` does, also where a parameter was never updated.

    The update rule of such a parameter has no state, and Chainer saves none; but when it loads,
    it asks for one unless the rule is disabled (KeyError). That is the case of every snapshot
    taken before the first step.
    """
    rules_without_state = []
    if isinstance(serializer, chainer.Deserializer):
        for name, rule in update_rules(optimizer.target).items():
            with contextlib.suppress(KeyError):  # the snapshot doesn't tell
                num_updates = serializer[name]("t", None)
                if rule.enabled and num_updates is not None and int(num_updates) == 0:
                    rule._state, rule.enabled = None, False
                    rules_without_state.append(rule)
    try:
        optimizer.serialize(serializer)
    finally:
        for rule in rules_without_state:
            rule.enabled = True
