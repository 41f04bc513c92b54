"""The updates of one multi-node optimizer: ranks compute gradients, agree, and step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from chainermn_comm import CommunicatorBase, Reducer

from ..collective_errors import raise_together
from ..leaving import is_warned
from ..slots import scaling_checksum
from ..wrappers import UnpicklableMixin
from .accumulation import Accumulation
from .agreement import (
    OPERATION,
    Action,
    Phase,
    Row,
    State,
    exchange_rows,
    settle,
    settle_compared,
)
from .gradient_clipping import refuse_hooks_by_norm
from .gradient_exchange import GradientExchange
from .gradient_set import is_updated, rescale
from .join_block import current_block
from .parameter_set import ParameterSet
from .shared_state import SharedState

# How many optimizers were made for a communicator.
_num_created: WeakKeyDictionary[CommunicatorBase, int] = WeakKeyDictionary()


class Agreed(NamedTuple):
    """What all ranks do, and the rows by which they have found that."""

    action: Action
    rows: list[Row]


class CollectiveUpdate(UnpicklableMixin):
    """Updates the parameters of a Chainer optimizer together with the other ranks.

    Attributes:
        agreements: how often ranks have agreed on what to do, alike on all ranks.
        leaves: whether a signal has warned any rank; the same on all after an update.
        exchange: how gradients become means, with those that no step has used.
        accumulation: gradients that were added up since the last step.
        state: what ranks have alike.
        signature: which optimizer this is; compared by each collective call.
        warn_of_leftovers: warns once, when it is called, when this is collected, or
            when Python ends.
    """

    def __init__(
        self,
        optimizer: Any,
        communicator: CommunicatorBase,
        arguments: dict[str, Any],
        exchange: GradientExchange,
    ) -> None:
        """Update the parameters of ``optimizer``; ``arguments`` must be equal on all ranks."""
        self._optimizer = optimizer
        self._communicator = communicator
        self._zero_fill = arguments["zero_fill"]
        self.agreements = 0
        self.leaves = False
        self.exchange = exchange
        self.accumulation = Accumulation(arguments["accumulate_steps"])
        self.state = SharedState(communicator, arguments)
        self.be_another()
        self.warn_of_leftovers = weakref.finalize(
            self, _warn_of_leftovers, communicator, self.accumulation, exchange
        )

    def update(self, compute_loss: Callable[[], Any] | None) -> None:
        """Do what :meth:`MultiNodeOptimizer.update` does (collective)."""
        if self.accumulation.is_between:
            self._accumulate(compute_loss)
            return
        block = current_block.get()
        if block is not None and not block.has_left and block.holds(self):
            block.begin_update(self)
        try:
            has_loss = compute_loss is not None or self._has_joined
            agreed = self._settle_before_loss("update()", has_loss)
            if compute_loss is not None:
                agreed = self._compute_gradients(compute_loss, agreed)
            elif self._has_joined:
                self._zero_gradients()
            if agreed.action is Action.GO_ON:
                agreed = self._agree_on_gradients("update()", own=1)
            if agreed.action is Action.RESEND:
                self.exchange.cancel()
                self.exchange.drop_plan()
                agreed = self._agree_on_gradients("update()", own=1)
        except BaseException:
            self.exchange.cancel()
            raise
        if agreed.action is Action.START_AGAIN:
            self._start_again()
        elif self.accumulation.is_last:
            self._step_along_means(agreed.rows)
        else:
            self._step(self._add)

    def flush(self) -> None:
        """Do what :meth:`MultiNodeOptimizer.flush` does (collective)."""
        exchange = self.exchange
        try:
            agreed = self._settle_before_loss("flush()", has_loss=True)
            if agreed.action is Action.GO_ON:
                agreed = self._agree_on_gradients("flush()", own=0)
        except BaseException:
            exchange.cancel()
            raise
        if agreed.action is Action.START_AGAIN:
            self._start_again()
            return
        self._step_along_means(agreed.rows)
        # No rank waits for another one: a hook may fail on some.
        self._step(exchange.apply_pending)

    def synchronize(self) -> None:
        """Do what :meth:`MultiNodeOptimizer.synchronize` does (collective)."""
        self._require_model()
        self.exchange.close(self.signature)
        self._share(compares=False)

    def forget(self) -> None:
        """Drop all gradients and what is known of the other ranks: there is another state."""
        self.state.forget()
        self._drop_gradients()
        self.exchange.drop_plan()

    # For `join`.

    @property
    def has_begun(self) -> bool:
        """Whether updates were made since the last step, of ``accumulate_steps`` ones."""
        return self.accumulation.num_calls > 0

    def update_without_examples(self) -> None:
        """Take part in the next collective update of other ranks (collective)."""
        while self.accumulation.is_between:
            self._accumulate(None)
        self.update(None)

    # An update, step by step.

    def _settle_before_loss(self, call: str, has_loss: bool) -> Agreed:
        """Agree before the loss if there is something to settle; others may be behind theirs.

        That the last step failed here they learn after backward, as others may
        communicate in their losses by now.
        """
        self._require_model()
        state = self.state.find(self._optimizer.target)
        if state not in (State.NEW, State.ASSUMED):
            return Agreed(Action.GO_ON, [])
        params = self._optimizer.target.params()
        can_count = has_loss and all(param.is_initialized for param in params)
        agreed = self._agree(call, Phase.BEFORE_LOSS, state, can_count=can_count)
        if agreed.action is not Action.SHARE:
            return agreed
        self._share(compares=True)
        return Agreed(Action.GO_ON, agreed.rows)

    def _compute_gradients(
        self, compute_loss: Callable[[], Any], agreed: Agreed
    ) -> Agreed:
        """Compute gradients, which may leave meanwhile if ranks agree to it before backward.

        An error stays in its rank until all know of it: else a caller that catches it,
        to skip a batch, would be one collective call ahead of the other ranks.
        """
        exchange = self.exchange
        params = self._params
        handshake = self._communicator.handshake
        with raise_together(handshake, OPERATION, meet=False):
            loss = self._loss(compute_loss)
            scale = self._scale
            can_send = exchange.can_send(params, loss)
            if agreed.action is not Action.GO_ON or not can_send:
                exchange.backward(params, loss, scale)
                return agreed
        state = self.state.find_after_loss()
        agreed = self._agree("update()", Phase.BEFORE_BACKWARD, state)
        with raise_together(handshake, OPERATION, meet=False):
            sends = agreed.action is Action.GO_ON
            exchange.backward(params, loss, scale, sends)
        return agreed

    def _loss(self, compute_loss: Callable[[], Any]) -> Any:
        """Do what :meth:`chainer.GradientMethod.update` does before backward."""
        loss = compute_loss()
        target = self._optimizer.target
        if getattr(self._optimizer, "_use_cleargrads", True):
            target.cleargrads()
        else:
            target.zerograds()
        return loss

    def _agree_on_gradients(self, call: str, own: int) -> Agreed:
        """Hand in gradients if a step is due, and agree (collective).

        ``own`` is 1 if the parameters' present gradients are among them, else 0: a step
        is due then if any were added up.
        """
        group = self.accumulation
        exchange = self.exchange
        params = self._params
        if own:
            _drop_unused(params)
        state = self.state.find_after_loss()
        reducer = None
        is_due = group.num_calls > 0
        if own:
            is_due = group.is_last
        if is_due and state in (State.SHARED, State.ASSUMED):
            scale = self._scale
            with raise_together(self._communicator.handshake, OPERATION, meet=False):
                if group.steps > 1:
                    group.assign_mean(params, scale, and_present=own > 0)
                else:
                    rescale(params, scale)
            reducer = exchange.ready(params, scale)
        terms = group.num_accumulated
        if not self._has_joined:
            terms += own
        return self._agree(call, Phase.READY, state, reducer, terms=terms)

    def _agree(
        self,
        call: str,
        phase: Phase,
        state: State,
        reducer: Reducer | None = None,
        can_count: bool = False,
        terms: int = 0,
    ) -> Agreed:
        """Return what all ranks do, and why (collective); raise on all if they can't go on."""
        optimizer = self._optimizer
        communicator = self._communicator
        exchange = self.exchange
        num_calls = self.accumulation.num_calls
        if call == "flush()":  # it takes any number
            num_calls = min(num_calls, 1)
        with raise_together(communicator.handshake, OPERATION, meet=False):
            refuse_hooks_by_norm(optimizer, self._params.parts)
            exchange.wait()
            row = Row(
                phase=phase,
                state=state,
                can_count=can_count,
                in_flight=exchange.pending is not None,
                must_resend=exchange.must_resend,
                can_plan=exchange.can_plan,
                is_warned=is_warned(),
                calls=num_calls,
                terms=terms,
                scaling=scaling_checksum(optimizer),
                checksum=self.state.checksum(optimizer),
            )
        if reducer is None:
            reducer = communicator.make_reducer(self._zero_fill, OPERATION)
        rows = exchange_rows(reducer, (*self.signature, ("call", call)), row)
        self.agreements += 1
        action = settle(rows)
        if action is Action.COMPARE:
            have_drifted = self.state.compare(optimizer, rows, num_calls)
            action = settle_compared(rows, have_drifted)
        if any([row.is_warned for row in rows]):
            self.leaves = True
            self.warn_of_leftovers.detach()  # a job that leaves saves them
        if action in (Action.GO_ON, Action.RESEND):
            self.state.advance()
        return Agreed(action, rows)

    def _step_along_means(self, rows: list[Row]) -> None:
        """Exchange what was handed in (collective), and step along the means."""
        terms = sum([row.terms for row in rows])
        if terms:
            self._step(partial(self._finish_exchange, rows, terms))
        else:  # every update since the last step has failed
            self.exchange.cancel()
            self.accumulation.clear()

    def _finish_exchange(self, rows: list[Row], terms: int) -> bool:
        """Exchange what was handed in (collective); say if there are means to step along."""
        factor = self.accumulation.steps * len(rows) / terms
        self.accumulation.clear()
        try:
            return self.exchange.finish(self._params, self._scale, factor)
        finally:  # all plan, also those where it fails
            if all([row.can_plan for row in rows]):
                self.exchange.plan(self._params)

    def _step(self, get_gradients: Callable[[], bool]) -> None:
        """Get gradients, and step along them if that says so."""
        try:
            if get_gradients():
                self._optimizer.update(None)
        except BaseException:
            # A hook's, say; this rank may not have stepped as the others did.
            self.state.is_apart = True
            raise

    def _start_again(self) -> None:
        """Give up this update's gradients, and give rank 0's state to all (collective)."""
        self.exchange.cancel()
        # Ranks that met before their loss have computed it meanwhile, or failed.
        self._communicator.handshake(OPERATION)
        self._share(compares=True)

    def _share(self, *, compares: bool) -> None:
        """Drop gradients, and give rank 0's state to all (collective)."""
        self._drop_gradients()
        self.exchange.drop_plan()
        self.state.share(self._optimizer, compares=compares)

    def _accumulate(self, compute_loss: Callable[[], Any] | None) -> None:
        """Make an update that no other rank knows of: add its gradients to the last ones."""
        try:
            if compute_loss is not None:
                loss = self._loss(compute_loss)
                self.exchange.backward(self._params, loss, self._scale)
        except BaseException:
            self.accumulation.num_calls += 1
            raise
        self._step(self._add)

    def _add(self) -> bool:
        """Add this update's gradients to the last ones; return False: no step yet."""
        if self._has_joined:
            self.accumulation.num_calls += 1
            return False
        _drop_unused(self._params)
        self.accumulation.add(self._params)
        return False

    def _zero_gradients(self) -> None:
        """Take part without examples: zeros for what the last update, or any, has a gradient of."""
        params = [param for param in self._params.params if param.is_initialized]
        for param in [param for param in params if param.grad is not None] or params:
            param.grad = param.device.xp.zeros_like(param.array)

    def _drop_gradients(self) -> None:
        self.accumulation.clear()
        self.exchange.set_pending(None)

    def be_another(self) -> None:
        """Take a number that no other optimizer of this communicator has.

        Optimizers have them in the order in which they are made or copied.
        """
        number = _num_created.get(self._communicator, 0) + 1
        _num_created[self._communicator] = number
        kind = type(self._optimizer).__name__
        self.signature = (("optimizer, by creation", f"number {number} ({kind})"),)

    def _require_model(self) -> None:
        if self._optimizer.target is None:
            with raise_together(self._communicator.handshake, OPERATION, meet=False):
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
        return self.state.params or ParameterSet(self._optimizer.target)

    @property
    def _scale(self) -> float | None:
        scale = getattr(self._optimizer, "_loss_scale", None)
        return None if scale is None else float(scale)


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


def _drop_unused(params: ParameterSet) -> None:
    """Drop gradients along which nobody steps; they are neither sent nor kept."""
    for param in params.params:
        if not is_updated(param):
            param.cleargrad()
