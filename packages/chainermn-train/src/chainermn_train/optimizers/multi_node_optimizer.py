"""The multi-node optimizer: a Chainer optimizer that steps along the mean gradient of all ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from numbers import Real
from typing import Any
from weakref import WeakKeyDictionary

import chainer

from chainermn_comm import CommunicatorBase, RankMismatchError, Reducer
from chainermn_comm.watchdog import count_update

from ..collective_errors import (
    bcast_checked,
    raise_together,
)
from ..host_arrays import to_host
from ..leaving import is_warned
from ..optimizer_state import (
    is_missing,
    serialize_mixed_precision,
    serialize_rules,
    serialize_state,
)
from ..wrappers import AttributeProxy, UnpicklableMixin
from .accumulation import Accumulation
from .decision import OPERATION, Decision, Report, agree, decide, keeps_gradients
from .drift import DriftDetector
from .gradient_clipping import refuse_hooks_by_norm
from .gradient_exchange import GradientExchange
from .gradient_set import (
    GradientSet,
    are_scaled_by,
    not_updated,
    rescale,
)
from .join_block import current_block
from .parameter_set import ParameterSet
from .replicated_state import ReplicatedState

# How many optimizers were made for a communicator.
_num_created: WeakKeyDictionary[CommunicatorBase, int] = WeakKeyDictionary()
Agreed = tuple[Decision, Report]  # what all ranks do, and the sums of their reports
_NOTHING = Report()
_ARGUMENTS = frozenset(
    {
        "accumulate_steps",
        "communicator",
        "double_buffering",
        "on_drift",
        "overlap",
        "zero_fill",
    }
)
_STALE = 2  # in a snapshot, where 1 stands for gradients in flight


class MultiNodeOptimizer(AttributeProxy, UnpicklableMixin):
    """A Chainer optimizer whose :meth:`update` steps along the mean gradient of all ranks.

    Every other attribute and method is that of ``actual_optimizer``, to read and to
    set: hyperparameters, hooks, ``target``, ``t`` and so on. Hooks therefore see the
    mean gradient.

    It is not a subclass of :class:`chainer.Optimizer`, whose class attributes would
    hide the actual optimizer's; Chainer's updaters, extensions and serializers don't
    ask for one.

    A copy, shallow or deep, has the same communicator. Pickling it raises TypeError.
    The arguments are those of :func:`create_multi_node_optimizer`, which makes it and
    checks them, and the ``exchange`` of gradients. Making one is not collective.

    Attributes:
        actual_optimizer: the optimizer that steps.
        communicator: the ranks that train together.
        zero_fill: whether a missing gradient counts as zeros.
        leaves: whether a signal has warned any rank; the same on all after an update.
        agreements: how often ranks have agreed on what to do, alike on all ranks.
    """

    _OWN = frozenset(
        {"actual_optimizer", "communicator", "zero_fill", "_settings", "_state"}
    )
    _OWN |= {
        "_group",
        "_drift",
        "_detects_drift",
        "_exchange",
        "_warn_of_leftovers",
        "_signature",
        "agreements",
        "leaves",
    }
    _ACTUAL = "actual_optimizer"

    def __init__(
        self,
        actual_optimizer: Any,
        communicator: CommunicatorBase,
        settings: dict[str, Any],
        exchange: GradientExchange,
    ) -> None:
        """Use ``exchange``; ``settings`` must be equal on all ranks."""
        self.actual_optimizer, self.communicator = actual_optimizer, communicator
        self.zero_fill, self._settings = settings["zero_fill"], settings
        self._state = ReplicatedState(communicator, settings)
        self._group = Accumulation(settings["accumulate_steps"])
        self._drift = DriftDetector()
        self._detects_drift = communicator.size > 1 and settings["on_drift"] != "ignore"
        self._exchange = exchange
        self._be_another()
        self.agreements = 0
        self.leaves = False
        # It is called once: by `finalize`, when this is collected, or when Python ends.
        self._warn_of_leftovers = weakref.finalize(
            self, _warn_of_leftovers, communicator, self._group, exchange
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS and "_settings" in vars(self):
            raise AttributeError(
                f"{name!r} is an argument of create_multi_node_optimizer, which can't be "
                "changed afterwards; make another optimizer"
            )
        super().__setattr__(name, value)

    def setup(self, link: Any) -> MultiNodeOptimizer:
        """Set the model, ``link``, and return itself, or raise TypeError, as in Chainer.

        Gradients of another model, in flight or added up, are dropped.
        """
        self.actual_optimizer.setup(link)
        self._drop_gradients()
        self._drift.restart()
        self._state.forget()
        return self

    def __copy__(self) -> MultiNodeOptimizer:
        twin: MultiNodeOptimizer = super().__copy__()
        twin._be_another()
        return twin

    def update(
        self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any
    ) -> None:
        """Update the parameters with the mean of all ranks' gradients (collective).

        Ranks may start from different states, and may initialise, add or replace
        parameters later. Whenever the set of initialised parameters has changed on any
        rank since the last call, or a step has raised on some (in a hook, say), all
        ranks get rank 0's state, as by :meth:`synchronize`, and on every rank gradients
        in flight or added up are dropped. If the set has changed on every rank, each
        gave ``lossfun`` and has all its parameters initialised, it happens before
        ``lossfun`` is called, and the update counts. Otherwise the gradients belong to
        parameters that ranks didn't share, and the call *does not step* (``t`` stays):
        so with lazily initialised links, such as ``L.Linear(None, 10)``, the first call
        does, and so does the first call without a loss function. Ranks that have
        drifted apart in other ways are noticed: see ``on_drift`` of
        :func:`create_multi_node_optimizer`.

        A rank that has no examples can take part by calling ``target.cleargrads()``
        and then ``update()``: its gradients count as zeros (if ``zero_fill``).

        With double buffering, the call steps along the gradients of the call before
        (the first doesn't step), while its own are on their way. With ``overlap``
        gradients leave while backward computes the others, and the call steps along its
        own. With ``accumulate_steps=k`` every k-th call exchanges and steps, and only
        the first and the last of k are collective. :meth:`flush` uses what is left.

        Gradients of parameters that are not updated
        (:meth:`chainer.Link.disable_update`) stay on their rank: hooks see zeros in
        their place.

        Args:
            lossfun: called with ``args`` and ``kwds``; the gradients of the variable
                that it returns are computed. None if the gradients are there already.
            args: arguments of ``lossfun``.
            kwds: keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: :meth:`setup` has not been called on this rank (PeerError on
                the others).
            RankMismatchError: ranks have different optimizers, scale losses
                differently, or were given different arguments; some flush; their states
                have drifted apart; or, without ``zero_fill``, not all have the same
                gradients (with double buffering on another's communicator the next call
                says so).
            BaseException: whatever ``lossfun`` or its backward raises on this rank
                (PeerError on the others). No rank steps then, and all may go on with
                the next update. Between the first and the last of ``accumulate_steps``
                calls it is raised on this rank only, and the others count one gradient
                less.
        """
        self._update(None if lossfun is None else partial(lossfun, *args, **kwds))
        count_update(
            _num_examples(args[0] if args else next(iter(kwds.values()), None))
        )

    def _update(self, compute_loss: Callable[[], Any] | None) -> None:
        if self._group.is_between:
            self._update_alone(compute_loss)
            return
        block = current_block.get()
        if block is not None and not block.has_left and block.holds(self):
            block.begin_update(self)
        try:
            without_loss = compute_loss is None and not self._has_joined
            agreed = self._agree_on_news("update()", without_loss)
            if compute_loss is not None:
                agreed = self._compute(compute_loss, agreed)
            elif self._has_joined:
                self._zero_gradients()
            if agreed[0] in (Decision.CONTINUE, Decision.SEND):
                agreed = self._agree_on_gradients("update()", own=1)
            if agreed[0] is Decision.RESEND:
                self._exchange.cancel()
                self._exchange.drop_plan()
                agreed = self._agree_on_gradients("update()", own=1)
        except BaseException:
            self._exchange.cancel()
            raise
        decision, total = agreed
        if decision is Decision.START_AGAIN:
            self._start_again(total)
        elif decision is Decision.ADD:
            self._step(self._add)
        elif not total.num_accumulated:  # every update of the group has failed
            self._exchange.cancel()
            self._group.clear()
        else:
            self._step(partial(self._take_means, total))

    def flush(self) -> None:
        """Use the gradients that no step has used yet (collective).

        Those in flight, with double buffering, make a step; then those that have been
        added up on any rank, if fewer than ``accumulate_steps``, make another one,
        along the mean of them all. To be called by all ranks when training ends, such
        as after ``trainer.run()``, or at the end of an epoch whose examples shall all
        count before the next; it does nothing where nothing is left. Where
        :meth:`update` would give rank 0's state to all and drop gradients, it does
        that. An optimizer that ends with such gradients warns on rank 0.

        Raises:
            RankMismatchError: other ranks update: they have made fewer updates, or
                more; or as :meth:`update` raises it.
            BaseException: what made the exchange in flight fail.
        """
        exchange = self._exchange
        try:
            decision, total = self._agree_on_news("flush()")
            if decision is Decision.CONTINUE:
                decision, total = self._agree_on_gradients("flush()", own=0)
        except BaseException:
            exchange.cancel()
            raise
        if decision is Decision.START_AGAIN:
            self._start_again(total)
            return
        if total.num_accumulated:
            self._step(partial(self._take_means, total))
        else:
            exchange.cancel()
            self._group.clear()
        # No rank waits for another one: a hook may fail on some.
        self._step(exchange.apply_pending)

    def synchronize(self) -> None:
        """Give rank 0's state to all ranks (collective); the first update does so by itself.

        That is: parameters, persistent values such as batch statistics, the optimizer's
        state, its ``t`` and its loss scale, and after the first update its
        hyperparameters. What rank 0 has no value for comes from the first rank that has
        one. Gradients in flight or added up are dropped.

        Raises:
            RuntimeError: :meth:`setup` has not been called on this rank (PeerError on
                the others).
            RankMismatchError: names of parameters differ, or other ranks do something
                else.
        """
        self._require_model()
        self._exchange.close(self._signature)
        self._share()

    def finalize(self) -> None:
        """Wait for the exchange in flight and free the communicator it used (collective).

        Only where gradients travel beside the computing there is anything to free, and
        only a program that makes many optimizers needs to. The communicator that the
        user gave stays theirs. What made the exchange fail is not raised.

        Raises:
            RankMismatchError: other ranks do something else.

        Warns:
            RuntimeWarning: on rank 0, if gradients are left that no step has used; also
                when an optimizer is collected that was not finalized.
        """
        self._exchange.close(self._signature)
        self._warn_of_leftovers()

    def serialize(self, serializer: Any) -> None:
        """Save or load the optimizer's state, as :meth:`chainer.Optimizer.serialize` does.

        Beyond what Chainer saves: the optimizer's class, the numbers that update rules
        have outside their state, gradients in flight (it waits for their means, which
        are equal on all ranks) and those added up so far (each rank's own), a dynamic
        loss scale, and the float32 parameters of :meth:`use_fp32_update`. So training
        that resumes goes on with the same bits (not collective). What a snapshot of
        Chainer's own lacks is left out. The next update gives rank 0's state to all;
        see :meth:`assume_synchronized`.

        Raises:
            ValueError: the snapshot is of another class of optimizer, or holds gradients
                that this optimizer, with other ``double_buffering`` or
                ``accumulate_steps``, has no use for.
            BaseException: what made the exchange in flight fail.
        """
        optimizer, exchange, group = self.actual_optimizer, self._exchange, self._group
        target, communicator = optimizer.target, self.communicator
        is_loading = isinstance(serializer, chainer.Deserializer)
        if is_loading:  # also where it fails midway
            self._state.forget(target)
            self._drop_gradients()
            exchange.drop_plan()
        own = serializer["chainermn"]
        serialize_rules(optimizer, own)
        serialize_state(optimizer, serializer)
        if is_missing(own, "in_flight"):  # Chainer's own snapshot, or of older versions
            return
        exchange.wait()
        flight = exchange.pending
        are_stale = any(
            each and not each.is_of(target) for each in (flight, group.sums)
        )
        held = int(own("in_flight", _STALE if are_stale else int(flight is not None)))
        # Of a link that was replaced: ranks drop what they have.
        if held == _STALE and is_loading:
            self._state.forget(chainer.Link())
        elif held == 1 and is_loading:
            exchange.set_pending(GradientSet.load(own["means"], target))
        elif held == 1 and flight is not None:
            flight.save(own["means"])
        serialize_mixed_precision(optimizer, own)
        group.serialize(own["group"], target, communicator.rank, communicator.size)

    def assume_synchronized(self) -> None:
        """Say that all ranks have the same state: the next update won't give them rank 0's.

        For users who load it on every rank and have made sure that they are equal, as
        ``maybe_load`` of a checkpointer does. Not collective; if a rank doesn't say so,
        the next update does so all the same. Before :meth:`setup` it raises
        AttributeError.
        """
        self._state.assume(self.target)
        self._drift.restart()

    # For `join`.

    @property
    def _group_has_begun(self) -> bool:
        """Whether updates were made since the last step, of ``accumulate_steps`` ones."""
        return self._group.num_calls > 0

    def _update_without_examples(self) -> None:
        """Take part in the next collective update of other ranks (collective)."""
        while self._group.is_between:
            self._update_alone(None)
        self._update(None)

    def _drop_group(self) -> None:
        """Drop gradients that were added up since the last step (not collective)."""
        self._group.clear()

    # An update, step by step.

    def _agree_on_news(self, call: str, without_loss: bool = False) -> Agreed:
        """Agree before the loss if something changed here; others may have computed theirs."""
        self._require_model()
        report = self._state.report(self.actual_optimizer)
        if report is None:
            return Decision.CONTINUE, _NOTHING
        cannot_count, held = (
            int(without_loss or report.cannot_count),
            self._group.num_accumulated,
        )
        report = report._replace(
            before_loss=1, cannot_count=cannot_count, num_accumulated=held
        )
        decision, total = self._agree(call, report)
        if decision is Decision.SYNCHRONIZE:
            self._share(total)
            decision = Decision.CONTINUE
        return decision, total

    def _compute(self, compute_loss: Callable[[], Any], agreed: Agreed) -> Agreed:
        """Compute gradients, which may leave meanwhile if ranks agree to it before backward.

        An error stays in its rank until all know of it: else a caller that catches it,
        to skip a batch, would be one collective call ahead of the other ranks.
        """
        exchange, params, handshake = (
            self._exchange,
            self._params,
            self.communicator.handshake,
        )
        with raise_together(handshake, OPERATION, meet=False):
            loss = self._loss(compute_loss)
            scale = self._scale
            if agreed[0] is not Decision.CONTINUE or not exchange.can_send(
                params, loss, scale
            ):
                exchange.backward(params, loss, scale)
                return agreed
        agreed = self._agree("update()", Report(before_backward=1))
        sends = agreed[0] is Decision.SEND
        with raise_together(handshake, OPERATION, meet=False):
            (exchange.backward_and_send if sends else exchange.backward)(
                params, loss, scale
            )
        return agreed

    def _loss(self, compute_loss: Callable[[], Any]) -> Any:
        """Do what :meth:`chainer.GradientMethod.update` does before backward."""
        loss, optimizer = compute_loss(), self.actual_optimizer
        uses_cleargrads, target = (
            getattr(optimizer, "_use_cleargrads", True),
            optimizer.target,
        )
        (target.cleargrads if uses_cleargrads else target.zerograds)()
        return loss

    def _agree_on_gradients(self, call: str, own: int) -> Agreed:
        """Hand the gradients in if they complete a group, and agree (collective).

        ``own`` is 1 if the parameters' present gradients are among them, else 0: all
        that there are complete a group then.
        """
        group, exchange, params = self._group, self._exchange, self._params
        changed = resend = can_plan = 0
        if own:
            _drop_unused(params)
        is_last, reducer = group.is_last or not own, None
        if self._state.has_initialized(self.actual_optimizer.target):  # by the loss
            changed = 1
        elif is_last and (own or group.num_calls) and not self._state.is_apart:
            scale = self._scale
            if group.steps > 1 or not are_scaled_by(params, scale):
                with raise_together(self.communicator.handshake, OPERATION, meet=False):
                    if group.steps > 1:
                        group.assign_mean(params, scale, and_present=own > 0)
                    else:
                        rescale(params, scale)
            reducer = exchange.ready(params, scale)
            resend, can_plan = int(exchange.must_resend), int(exchange.can_plan)
        held = group.num_accumulated + (own if not self._has_joined else 0)
        report = Report(
            changed=changed, resend=resend, can_plan=can_plan, num_accumulated=held
        )
        return self._agree(call, report, reducer, is_last)

    def _agree(
        self,
        call: str,
        report: Report,
        reducer: Reducer | None = None,
        is_last: bool = True,
    ) -> Agreed:
        """Return what all ranks do, and why (collective); raise on all if they can't go on.

        ``is_last`` says whether the gradients complete a group.
        """
        optimizer, communicator, exchange = (
            self.actual_optimizer,
            self.communicator,
            self._exchange,
        )
        digest, num_calls = 0, self._group.num_calls
        with raise_together(communicator.handshake, OPERATION, meet=False):
            refuse_hooks_by_norm(optimizer, self._params.parts)
            exchange.wait()
            own = self._state.is_apart, exchange.pending is not None
            if any(own):
                report = report._replace(apart=own[0], in_flight=own[1])
            if is_warned():
                report = report._replace(warned=1)
            if self._detects_drift:
                digest = self._drift.checksum(self._params, optimizer)
        reducer = reducer or communicator.make_reducer(self.zero_fill, OPERATION)
        # It takes any number.
        num_calls = min(num_calls, 1) if call == "flush()" else num_calls
        signature = (*self._signature, ("call", call))
        total = agree(reducer, signature, report, digest, num_calls)
        self.agreements += 1
        if total.warned:
            self.leaves = True
            self._warn_of_leftovers.detach()  # a job that leaves saves them
        while True:
            decision = decide(total, communicator.size, is_last)
            if decision is Decision.COMPARE_SETTINGS:
                self._state.compare_settings(optimizer, total, num_calls)
                total = total._replace(rescaled=0)
            elif decision is Decision.COMPARE_STATE:
                total = total._replace(drifted=0, apart=int(self._has_drifted()))
            else:
                break
        # Where rank 0's state goes to all, a new turn begins.
        if self._detects_drift and decision not in (
            Decision.SYNCHRONIZE,
            Decision.START_AGAIN,
        ):
            self._drift.advance()
        return decision, total

    def _take_means(self, total: Report) -> bool:
        """Exchange what was handed in (collective); say if there are means to step along."""
        size = self.communicator.size
        factor = self._group.steps * size / total.num_accumulated
        self._group.clear()
        try:
            return self._exchange.finish(self._params, self._scale, factor)
        finally:  # all plan, also those where it fails
            if total.can_plan == size:
                self._exchange.plan(self._params)

    def _step(self, take: Callable[[], bool]) -> None:
        """Take gradients, and step along them if that says so."""
        optimizer = self.actual_optimizer
        adapts = getattr(optimizer, "_loss_scaling_is_dynamic", False)
        are_alike = adapts and self._state.has_noted(optimizer)
        try:
            if take():
                optimizer.update(None)
        except BaseException:
            # A hook's, say; this rank may not have stepped as the others did.
            self._state.is_apart = True
            raise
        if are_alike:
            self._state.note_scaling(optimizer)

    def _start_again(self, total: Report) -> None:
        """Give up this update's gradients, and give rank 0's state to all (collective)."""
        self._exchange.cancel()
        # Ranks that had news before their loss have computed it meanwhile, or failed.
        self.communicator.handshake(OPERATION)
        self._share(total)

    def _share(self, total: Report = _NOTHING) -> None:
        """Give rank 0's state to all (collective), as these reports ask for."""
        size = self.communicator.size
        keeps = keeps_gradients(total, size)
        if not keeps:
            self._drop_gradients()
        self._exchange.drop_plan()
        self._state.synchronize(self.actual_optimizer)
        if keeps and (total.in_flight or total.num_accumulated):
            self._replicate_gradients()
        self._drift.restart()

    def _replicate_gradients(self) -> None:
        """Give rank 0's gradients in flight to all (collective)."""
        self._exchange.wait()
        flight = self._exchange.pending

        def give() -> tuple[Any, ...]:
            means = [to_host(each.grad) for each in flight.gradients] if flight else []
            return flight and flight.scale, means

        scale_of_means, means = bcast_checked(self.communicator, OPERATION, give)
        if flight is not None:
            flight.scale = scale_of_means
            for each, mean in zip(flight.gradients, means, strict=True):
                each.grad = mean

    def _update_alone(self, compute_loss: Callable[[], Any] | None) -> None:
        """Make an update in the middle of a group; no other rank knows of it."""
        try:
            if compute_loss is not None:
                loss = self._loss(compute_loss)
                self._exchange.backward(self._params, loss, self._scale)
        except BaseException:
            self._group.num_calls += 1
            raise
        self._step(self._add)

    def _add(self) -> bool:
        """Add this update's gradients to the group's; return False: no step yet."""
        if self._has_joined:
            self._group.num_calls += 1
            return False
        _drop_unused(self._params)
        self._group.add(self._params)
        return False

    def _zero_gradients(self) -> None:
        """Take part without examples: zeros for what the last update, or any, has a gradient of."""
        params = [param for param in self._params.params if param.is_initialized]
        for param in [param for param in params if param.grad is not None] or params:
            param.grad = param.device.xp.zeros_like(param.array)

    def _has_drifted(self) -> bool:
        """Raise on all what differs, or warn and return True if it is to be repaired."""
        try:
            self._drift.raise_difference(self.communicator, self.actual_optimizer)
        except RankMismatchError as error:
            if self._settings["on_drift"] == "raise":
                raise
            # If warnings are errors.
            with raise_together(self.communicator.handshake, OPERATION):
                if self.communicator.rank == 0:
                    warnings.warn(
                        f"{error}; all ranks get rank 0's", RuntimeWarning, stacklevel=4
                    )
            return True
        return False

    def _drop_gradients(self) -> None:
        self._group.clear()
        self._exchange.set_pending(None)

    def _be_another(self) -> None:
        """Take a number that no other optimizer of this communicator has.

        Optimizers have them in the order in which they are made or copied.
        """
        # Different wrappers of one communicator have its handshake.
        handshake = self.communicator.handshake
        owner = getattr(handshake, "__self__", self.communicator)
        number = _num_created.get(owner, 0) + 1
        _num_created[owner] = number
        kind = type(self.actual_optimizer).__name__
        self._signature = (("optimizer, by creation", f"number {number} ({kind})"),)

    def _require_model(self) -> None:
        if self.actual_optimizer.target is None:
            with raise_together(self.communicator.handshake, OPERATION, meet=False):
                raise RuntimeError(
                    "the optimizer has no model: call its `setup(model)` first"
                )

    @property
    def _has_joined(self) -> bool:
        """Whether this rank has left a block of :func:`join` that other ranks are in."""
        block = current_block.get()
        return block is not None and block.has_left and block.holds(self)

    @property
    def _params(self) -> ParameterSet:
        return self._state.shared or ParameterSet(self.actual_optimizer.target)

    @property
    def _scale(self) -> float | None:
        scale = getattr(self.actual_optimizer, "_loss_scale", None)
        # A mock's.
        return None if scale is None or not isinstance(scale, Real) else float(scale)


def _warn_of_leftovers(
    communicator: CommunicatorBase, group: Accumulation, exchange: GradientExchange
) -> None:
    """Warn on rank 0 if it has gradients that no step has used."""
    if communicator.rank == 0 and (exchange.pending or group.num_accumulated):
        warnings.warn(
            "gradients are left that no step has used, as double_buffering and "
            "accumulate_steps leave them at the end: call the optimizer's flush() "
            "on all ranks after the last update",
            RuntimeWarning,
            stacklevel=4,
        )


def _num_examples(first: Any) -> int:
    """Return the length of a loss function's first argument, an array or list; else 0."""
    shape = (len(first),) if type(first) is list else getattr(first, "shape", ())
    return shape[0] if type(shape) is tuple and shape else 0


def _drop_unused(params: ParameterSet) -> None:
    """Drop gradients along which nobody steps; they are neither sent nor kept."""
    for param in not_updated(params):
        param.cleargrad()
