"""The multi-node optimizer: a Chainer optimizer that steps along the mean gradient of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from chainermn_comm import CommunicatorBase, MeanInProgress

from ..collective_errors import raise_on_all_ranks, share_failure
from ..wrappers import AttributeProxy, UnpicklableMixin
from .agreement import OPERATION, STEADY, Flags, agree, steady
from .gpus import are_on_gpus
from .gradient_accumulator import GradientAccumulator
from .gradient_exchange import GradientExchange
from .mixed_precision import (
    scale_missing_gradients,
    serialize_loss_scale,
    serialize_master_weights,
    unscale_missing_gradients,
)
from .optimizer_state import is_missing, serialize_state
from .parameter_synchronizer import ParameterSynchronizer


class MultiNodeOptimizer(AttributeProxy, UnpicklableMixin):
    """A Chainer optimizer whose :meth:`update` steps along the mean gradient of all ranks.

    Every other attribute and method is that of ``actual_optimizer``, to read and to set:
    hyperparameters, hooks, ``target``, ``t`` and so on. Hooks therefore see the mean gradient.

    It is not a subclass of :class:`chainer.Optimizer`, whose class attributes would hide
    the actual optimizer's; Chainer's updaters, extensions and serializers don't ask for one.

    A copy, shallow or deep, has the same communicator. Pickling it raises TypeError. The arguments
    are those of :func:`create_multi_node_optimizer`, which makes it and checks them, and the
    ``exchange`` of gradients. Making one is not collective.

    Attributes:
        actual_optimizer: the optimizer that steps.
        communicator: the ranks that train together.
        zero_fill: whether a missing gradient counts as zeros.
    """

    _OWN = frozenset({"actual_optimizer", "communicator", "zero_fill"})
    _OWN |= {"_synchronizer", "_accumulator", "_exchange", "_exchange_on_gpus"}
    _ACTUAL = "actual_optimizer"

    def __init__(
        self,
        actual_optimizer: Any,
        communicator: CommunicatorBase,
        zero_fill: bool,
        exchange: GradientExchange,
        settings: dict[str, Any],
        exchange_on_gpus: GradientExchange | None = None,
    ) -> None:
        """Use ``exchange``; ``settings`` must be equal on all ranks.

        Where parameters are on GPUs ``exchange_on_gpus`` takes its place, if there is one.
        """
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.zero_fill = zero_fill
        self._synchronizer = ParameterSynchronizer(communicator, settings)
        self._accumulator = GradientAccumulator(settings["accumulate_steps"])
        self._exchange, self._exchange_on_gpus = exchange, exchange_on_gpus

    def setup(self, link: Any) -> MultiNodeOptimizer:
        """Set the model, ``link``, and return itself, or raise TypeError, as in Chainer."""
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any) -> None:
        """Update the parameters with the mean of all ranks' gradients (collective).

        Ranks may start from different weights, and may initialise, add or replace
        parameters later. Whenever the set of initialised parameters has changed on any
        rank since the last call, all ranks get rank 0's parameters. That happens before
        ``lossfun`` is called if it has changed on every rank, and every rank gave one and has
        all its parameters initialised: nothing is lost then. Otherwise the gradients belong to
        parameters that ranks didn't share, so the call broadcasts the parameters and *does not
        step* (``t`` stays): so with lazily initialised links, such as ``L.Linear(None, 10)``,
        the first call does, and so does the first call without a loss function. Where it has
        changed on some ranks only, all get rank 0's optimizer state, too.

        A step that raises on some ranks, in a hook say, leaves them apart from the others. The
        next call gives rank 0's parameters, optimizer state and ``t`` to all; unless the step
        raised on every rank, that call does not step.

        A rank that has no examples can take part by calling ``target.cleargrads()``
        and then ``update()``: its gradients count as zeros (if ``zero_fill``).

        With double buffering, the call steps along the gradients of the call before (the
        first doesn't step), each undone the loss scale it was made with, while its own are
        on their way. With ``overlap`` gradients leave while backward computes the others, and
        the call steps along its own. With ``accumulate_steps=k`` every k-th call exchanges and
        steps, and only the first and the last of k are collective. :meth:`flush` uses what is
        left at the end.

        Args:
            lossfun: called with ``args`` and ``kwds``; the gradients of the variable that
                it returns are computed. None if the gradients are there already.
            args: arguments of ``lossfun``.
            kwds: keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: :meth:`setup` has not been called on this rank
                (a :class:`~chainermn_comm.errors.PeerError` on the others).
            RankMismatchError: ranks have different optimizers, scale losses differently, or were
                given different ``double_buffering``, ``overlap``, ``accumulate_steps`` or
                ``zero_fill``; some flush; or, without ``zero_fill``, not all have the same
                gradients (with double buffering on another's communicator the next call says so).
            BaseException: whatever ``lossfun`` or its backward raises on this rank (a
                :class:`~chainermn_comm.errors.PeerError` that names the rank on the others).
                No rank steps then, and all may go on with the next update. Between the first
                and the last of ``accumulate_steps`` calls it is raised on this rank only, and
                the others count one gradient less.
        """
        optimizer, accumulator = self.actual_optimizer, self._accumulator
        if 0 < accumulator.num_calls < accumulator.steps - 1:  # neither first nor last of a group
            params = self._synchronizer.params(optimizer.target)
            compute = partial(_compute_gradients, optimizer, _backward_alone, lossfun, args, kwds)
            accumulator.update(optimizer, params, compute)
            return
        call = f"update() after {accumulator.num_calls} updates of a step"
        self._exchange.begin()
        try:
            known = self._agree_before_loss(call, lossfun is None)
            self._compute_gradients(known, lossfun, args, kwds)
            are_means = self._exchange_gradients(call, known)
        except BaseException:
            self._exchange.discard()
            raise
        if are_means:
            self._step()

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
        accumulator, exchange = self._accumulator, self._exchange
        total = self._agree("flush()", Flags(num_accumulated=accumulator.num_accumulated))
        try:
            if exchange.flush():
                self._step()
        finally:  # where a hook has failed, too: the other ranks go on
            if total.num_accumulated:
                params = self._synchronizer.params(self.target)
                num_per_rank = total.num_accumulated / self.communicator.size
                accumulator.complete(params, num_per_rank, and_present=False)
                exchange.prepare(params)
                self._agree("flush()", STEADY, exchange.ready(params))
            accumulator.reset()
            if total.num_accumulated and (exchange.finish() or exchange.flush()):
                self._step()

    def finalize(self) -> None:
        """Wait for the exchange in flight and free the communicator it used (collective).

        Only where gradients travel beside the computing there is anything to do, and only a
        program that makes many optimizers needs to. The communicator that the user gave stays
        theirs. What made the exchange fail is not raised.
        """
        self._exchange.close()

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
        optimizer, accumulator = self.actual_optimizer, self._accumulator
        serialize_state(optimizer, serializer)
        own = serializer["chainermn"]
        if is_missing(own, "in_flight"):  # Chainer's own snapshot, or of older versions
            accumulator.reset()
            self._exchange.drop()
            return
        self._exchange.serialize(own, optimizer.target)
        serialize_loss_scale(optimizer, own)
        serialize_master_weights(optimizer.target, own["masters"])
        communicator = self.communicator
        accumulator.serialize(own["group"], optimizer.target, communicator.rank, communicator.size)

    def assume_synchronized(self) -> None:
        """Say that all ranks have the same parameters: the next update won't broadcast them.

        For who loads them on every rank and has made sure that they are equal, as
        ``maybe_load`` of a checkpointer does. Not collective; if a rank doesn't say so, the
        next update broadcasts all the same. Before :meth:`setup` it raises AttributeError.
        """
        self._synchronizer.mark_synchronized(self.target)

    def _agree_before_loss(self, call: str, without_loss: bool) -> Flags:
        """Find out what has changed, if anything has here; broadcast if nothing is lost by it.

        Returns what is open until the loss has been computed; ``STEADY`` if nothing is. It is
        collective where something has changed; other ranks may have computed their loss.
        """
        flags = self._synchronizer.flags(self.actual_optimizer)
        if flags is STEADY and self._exchange.is_prepared:
            return STEADY
        flags = flags._replace(before_loss=1, without_loss=int(without_loss))
        total = self._agree(call, flags)
        if total.before_loss < self.communicator.size:  # others have computed their loss
            self._exchange.discard()
            return total
        params = self._synchronizer.params(self.target)
        if self._exchange_on_gpus is not None and are_on_gpus(params):
            self._exchange, self._exchange_on_gpus = self._exchange_on_gpus, None
        self._exchange.prepare(params)
        if not (total.changed or total.apart or total.uninitialized):
            return STEADY
        if total.uninitialized or total.without_loss:
            return total
        self._broadcast(bool(total.apart))
        return STEADY

    def _compute_gradients(
        self, known: Flags, lossfun: Callable[..., Any] | None, args: Any, kwds: Any
    ) -> None:
        """Compute gradients, which may leave meanwhile if no other follow in a group.

        An error stays in its rank until all know of it: else a caller that catches it, to skip a
        batch, would be one collective call ahead of the other ranks.
        """
        optimizer, backward = self.actual_optimizer, _backward_alone
        try:
            if self._accumulator.steps == 1 and not self._must_start_again(known):
                params = self._synchronizer.params(optimizer.target)
                backward = partial(self._exchange.backward, params)
            _compute_gradients(optimizer, backward, lossfun, args, kwds)
        except BaseException as error:
            share_failure(self.communicator.handshake, OPERATION, error)
            raise

    def _exchange_gradients(self, call: str, known: Flags) -> bool:
        """Exchange gradients, or what ranks find out they have to first (collective).

        ``known`` is what all ranks knew before the loss. Returns whether to step.
        """
        optimizer, accumulator, exchange = self.actual_optimizer, self._accumulator, self._exchange
        synchronizer = self._synchronizer
        if self._must_start_again(known):
            self._start_again(known)
            return False
        params = synchronizer.params(optimizer.target)
        flags = steady(accumulator.num_accumulated + 1)
        if known.uninitialized or params.has_uninitialized:  # what the loss may have initialised
            flags = flags._replace(changed=synchronizer.flags(optimizer).changed)
        if getattr(optimizer, "_loss_scale", None) is not None:
            scale_missing_gradients(optimizer, params)
        is_last = accumulator.num_calls == accumulator.steps - 1
        if not is_last or flags.changed:
            total = self._agree(call, flags)
        else:
            if accumulator.steps > 1:
                accumulator.complete(params, accumulator.steps)
            total = self._agree(call, flags, exchange.ready(params))
        if total.changed or total.before_loss:
            exchange.discard()
            self._start_again(total)
            return False
        if not is_last:
            accumulator.add(params)
            return False
        if total.redo or 0 < total.planned < self.communicator.size:
            exchange.redo()
            total = self._agree(call, flags, exchange.ready(params))
        accumulator.reset()
        size = self.communicator.size
        try:
            are_means = exchange.finish(accumulator.steps * size / total.num_accumulated)
        except BaseException:  # the others may step
            synchronizer.mark_apart()
            raise
        if total.can_plan == size:
            exchange.plan(params)
        return are_means

    def _agree(self, call: str, flags: Flags, mean: MeanInProgress | None = None) -> Flags:
        """Return the sums of all ranks' flags (collective); raise if ranks can't go on."""
        exchange = self._exchange
        if exchange.error() is not None:
            flags = flags._replace(failed=1)
        if exchange.is_planned:
            flags = flags._replace(planned=1, redo=int(exchange.must_redo))
        if exchange.can_plan:
            flags = flags._replace(can_plan=1)
        mean = mean or self.communicator.start_mean(self.zero_fill, OPERATION)
        total = agree(mean, call, flags)
        if total.without_model or total.rescaled:
            self._synchronizer.require_alike(self.actual_optimizer, flags, total)
        if 0 < total.planned < self.communicator.size:
            exchange.discard()
        if total.failed:
            with raise_on_all_ranks(self.communicator, OPERATION):
                exchange.flush()
        return total

    def _must_start_again(self, known: Flags) -> bool:
        """Return whether gradients are of no use: some rank found a change before its loss."""
        if known is STEADY:
            return False
        is_mixed = 0 < known.before_loss < self.communicator.size
        return bool(known.changed or known.apart or is_mixed)

    def _start_again(self, known: Flags) -> None:
        """Give up this update's gradients, and make parameters equal (collective)."""
        # Ranks that saw a change before their loss have computed it meanwhile, or failed.
        self.communicator.handshake(OPERATION)
        self._synchronizer.initialize_missing(self.target)
        self._broadcast(bool(known.apart) or 0 < known.before_loss < self.communicator.size)

    def _step(self) -> None:
        optimizer = self.actual_optimizer
        if getattr(optimizer, "_loss_scale", None) is not None:
            unscale_missing_gradients(optimizer, self._synchronizer.params(optimizer.target))
        try:
            optimizer.update(None)
        except BaseException:  # a hook's, say; this rank may not have stepped as the others did
            self._synchronizer.mark_apart()
            raise
        # It may have changed, on all ranks alike.
        self._synchronizer.mark_loss_scaling_synchronized(optimizer)

    def _broadcast(self, and_state: bool) -> None:
        """Give rank 0's parameters, and the optimizer's state, to all ranks (collective)."""
        # Gradients of deleted parameters must not move new ones.
        new = self._synchronizer.new_parameters(self.target)
        self._accumulator.discard(new)
        self._exchange.forget(new)
        self._synchronizer.broadcast(self.actual_optimizer, and_state)


# Calls a loss's backward with a loss scale.
Backward: TypeAlias = Callable[[Any, float | None], None]


def _backward_alone(loss: Any, loss_scale: float | None) -> None:
    loss.backward(loss_scale=loss_scale)


def _compute_gradients(
    optimizer: Any, backward: Backward, lossfun: Callable[..., Any] | None, args: Any, kwds: Any
) -> None:
    """Compute gradients as :meth:`chainer.GradientMethod.update` does before it steps."""
    if lossfun is None:  # they are there
        return
    loss = lossfun(*args, **kwds)
    if getattr(optimizer, "_use_cleargrads", True):
        optimizer.target.cleargrads()
    else:
        optimizer.target.zerograds()
    backward(loss, getattr(optimizer, "_loss_scale", None))
