"""The updates of one multi-node optimizer: ranks compute gradients, agree, and step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from chainermn_comm import CommunicatorBase, Reducer

from ..collective_errors import raise_together
from ..leaving import is_warned
from ..slots import scaling_checksum
from .accumulation import Accumulation
from .agreement import (
    OPERATION,
    Action,
    Phase,
    Row,
    exchange_rows,
    settle,
    settle_compared,
)
from .gradient_clipping import refuse_hooks_by_norm
from .gradient_exchange import GradientExchange
from .gradient_set import is_updated, present_gradient, rescale
from .join_block import current_block
from .parameter_set import ParameterSet
from .shared_state import SharedState

UPDATE = "update()"
FLUSH = "flush()"
# The numbers of further optimizers of each communicator.
_numbers: WeakKeyDictionary[CommunicatorBase, Iterator[int]] = WeakKeyDictionary()


class CollectiveUpdate:
    """Updates the parameters of a Chainer optimizer together with the other ranks.

    A copy is another optimizer for the other ranks.

    Attributes:
        agreements: how often ranks have agreed on what to do, alike on all ranks.
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
        self._rows: list[Row] = []  # of the last agreement
        self.agreements = 0
        self.exchange = exchange
        self.accumulation = Accumulation(arguments["accumulate_steps"])
        self.state = SharedState(communicator, arguments)
        self.signature = self._new_signature()
        self.warn_of_leftovers = weakref.finalize(
            self, _warn_of_leftovers, communicator, self.accumulation, exchange
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.signature = self._new_signature()

    @property
    def leaves(self) -> bool:
        """Whether a signal has warned any rank; the same on all after an update."""
        return any([row.is_warned for row in self._rows])

    def update(self, compute_loss: Callable[[], Any] | None) -> None:
        """Do what :meth:`MultiNodeOptimizer.update` does (collective)."""
        if self.accumulation.is_between:  # no other rank knows of this update
            self.accumulation.num_calls += 1
            if compute_loss is not None:
                loss = self._loss(compute_loss)
                self.exchange.backward(self._params, loss, self._scale)
            self._step(partial(self._add, own=1))
            return
        block = current_block.get()
        if block is not None and self in block.optimizers:
            block.begin_update(self)
        self._update_together(compute_loss, own=1)

    def update_without_examples(self) -> None:
        """Take part in the next collective update of other ranks (collective)."""
        while self.accumulation.is_between:
            self.accumulation.num_calls += 1
        self._zero_gradients()
        self._update_together(None, own=0)

    def flush(self) -> None:
        """Do what :meth:`MultiNodeOptimizer.flush` does (collective)."""
        action = self._compute_and_agree(FLUSH, None, own=0)
        self._finish(action)
        if action is Action.GO_ON:
            # No rank waits for another one: a hook may fail on some.
            self._step(self.exchange.assign_pending)

    def synchronize(self) -> None:
        """Do what :meth:`MultiNodeOptimizer.synchronize` does (collective)."""
        self.exchange.close(self.signature)
        self._share()

    def forget(self) -> None:
        """Drop all gradients and what is known of the other ranks: there is another state."""
        self.state.forget()
        self.accumulation.clear()
        self.exchange.drop()

    # An update, step by step.

    def _update_together(
        self, compute_loss: Callable[[], Any] | None, own: int
    ) -> None:
        action = self._compute_and_agree(UPDATE, compute_loss, own)
        if action is Action.GO_ON and not self.accumulation.is_last:
            self.accumulation.num_calls += 1
            self._step(partial(self._add, own))
        else:
            self._finish(action)

    def _compute_and_agree(
        self, call: str, compute_loss: Callable[[], Any] | None, own: int
    ) -> Action:
        """Compute gradients, hand them in, and return what all ranks do (collective).

        This rank's present gradients are then those of ``own`` updates, 0 or 1.
        """
        try:
            # Of rank 0's state, if that goes to all now.
            can_count = compute_loss is not None or own == 0
            action = self._agree_before_loss(call, can_count)
            if compute_loss is not None:
                action = self._compute_gradients(compute_loss, action)
            if action is Action.GO_ON:
                action = self._agree_on_gradients(call, own)
            if action is Action.RESEND:
                self.exchange.cancel()
                action = self._agree_on_gradients(call, own)
        except BaseException:
            self.exchange.cancel()
            raise
        return action

    def _agree_before_loss(self, call: str, can_count: bool) -> Action:
        """Agree if there is something to settle (collective); others may be behind their loss.

        A failed step is reported only after backward, because other ranks may already
        be communicating inside their loss. ``can_count`` says whether this rank's
        gradients will be those of the state that it has now.
        """
        action = Action.GO_ON
        if self.state.is_new(self._optimizer.target):
            action = self._agree(
                call, Phase.BEFORE_LOSS, is_new=True, can_count=can_count
            )
        if action is Action.SHARE:
            self._share()
            action = Action.GO_ON
        return action

    def _compute_gradients(
        self, compute_loss: Callable[[], Any], action: Action
    ) -> Action:
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
            if action is not Action.GO_ON or not can_send:
                exchange.backward(params, loss, scale)
                return action
        is_new = self.state.is_new_after_loss()
        action = self._agree(UPDATE, Phase.BEFORE_BACKWARD, is_new)
        with raise_together(handshake, OPERATION, meet=False):
            sends = action is Action.GO_ON
            exchange.backward(params, loss, scale, sends)
        return action

    def _loss(self, compute_loss: Callable[[], Any]) -> Any:
        """Do what :meth:`chainer.GradientMethod.update` does before backward."""
        loss = compute_loss()
        self._optimizer.target.cleargrads()
        return loss

    def _agree_on_gradients(self, call: str, own: int) -> Action:
        """Hand in gradients if a step is due, and agree (collective)."""
        accumulation = self.accumulation
        params = self._params
        scale = self._scale
        is_due = accumulation.is_last
        if call == FLUSH:
            is_due = accumulation.num_calls > 0
        else:
            _drop_unused(params)
        is_new = self.state.is_new_after_loss()
        reducer = None
        if is_due and not is_new:
            with raise_together(self._communicator.handshake, OPERATION, meet=False):
                if accumulation.steps > 1:
                    accumulation.assign_mean(params, scale, call == UPDATE)
                else:
                    rescale(params, scale)
            reducer = self.exchange.reducer_of(params, scale)
        terms = accumulation.num_accumulated + own
        return self._agree(call, Phase.READY, is_new, reducer, terms=terms)

    def _agree(
        self,
        call: str,
        phase: Phase,
        is_new: bool,
        reducer: Reducer | None = None,
        can_count: bool = False,
        terms: int = 0,
    ) -> Action:
        """Return what all ranks do (collective); raise on all if they can't go on."""
        optimizer = self._optimizer
        communicator = self._communicator
        exchange = self.exchange
        num_calls = self.accumulation.num_calls
        if call == FLUSH:  # it takes any number
            num_calls = min(num_calls, 1)
        with raise_together(communicator.handshake, OPERATION, meet=False):
            params = self._params
            refuse_hooks_by_norm(optimizer, params.parts)
            exchange.wait()
            row = Row(
                phase=phase,
                is_new=is_new,
                can_count=can_count and not params.uninitialized,
                in_flight=exchange.pending is not None,
                can_plan=exchange.can_plan,
                is_warned=is_warned(),
                calls=num_calls,
                terms=terms,
                scaling=scaling_checksum(optimizer),
                checksum=self.state.checksum(optimizer),
            )
        if reducer is None:
            reducer = communicator.make_reducer(self._zero_fill, OPERATION)
        settings = self.state.settings(optimizer)
        signature = (*self.signature, ("call", call), *settings)
        rows = exchange_rows(reducer, signature, row)
        self.state.has_equal_settings = True
        self._rows = rows
        self.agreements += 1
        action = settle(rows)
        if action is Action.COMPARE:
            have_drifted = self.state.compare(optimizer, rows, num_calls)
            action = settle_compared(rows, have_drifted)
        if self.leaves:
            self.warn_of_leftovers.detach()  # a job that leaves saves them
        if action in (Action.GO_ON, Action.RESEND):
            self.state.advance()
        return action

    def _finish(self, action: Action) -> None:
        """Step along the means of what ranks have handed in; or start again (collective)."""
        exchange = self.exchange
        if action is Action.START_AGAIN:
            exchange.cancel()
            # Ranks that met before their loss have computed it meanwhile, or failed.
            self._communicator.handshake(OPERATION)
            self._share()
        elif any([row.terms for row in self._rows]):
            self._step(self._take_means)
        else:  # nothing was added up: at a flush, or every update has failed
            exchange.cancel()
            self.accumulation.clear()

    def _take_means(self) -> bool:
        """Exchange what was handed in (collective); say if there are means to step along."""
        rows = self._rows
        terms = sum([row.terms for row in rows])
        factor = self.accumulation.steps * len(rows) / terms
        self.accumulation.clear()
        try:
            return self.exchange.finish(self._params, self._scale, factor)
        finally:  # all plan, also those where it fails
            if all([row.can_plan for row in rows]):
                self.exchange.plan(self._params)

    def _step(self, take_means: Callable[[], bool]) -> None:
        """Take means, and step along them if there are any."""
        try:
            if take_means():
                self._optimizer.update(None)
        except BaseException:
            # A hook's, say; this rank may not have stepped as the others did.
            self.state.is_apart = True
            raise

    def _add(self, own: int) -> bool:
        """Add the present gradients to the last ones; return False: no step yet."""
        _drop_unused(self._params)
        self.accumulation.add(self._params, own)
        return False

    def _share(self) -> None:
        """Drop gradients, and give rank 0's state to all (collective)."""
        self.accumulation.clear()
        self.exchange.drop()
        self.state.share(self._optimizer)

    def _zero_gradients(self) -> None:
        """Give zeros to all that has a gradient, from the last update say."""
        for param in self._optimizer.target.params():
            if present_gradient(param) is not None:
                param.grad = param.device.xp.zeros_like(param.array)

    def _new_signature(self) -> tuple[tuple[str, str], ...]:
        """Return one with a number that no other optimizer of this communicator has.

        Optimizers have them in the order in which they are made or copied.
        """
        number = next(_numbers.setdefault(self._communicator, count(1)))
        kind = type(self._optimizer).__name__
        return (("optimizer, by creation", f"number {number} ({kind})"),)

    @property
    def _params(self) -> ParameterSet:
        return self.state.params or ParameterSet(self._optimizer.target)

    @property
    def _scale(self) -> float | None:
        scale: float | None = getattr(self._optimizer, "_loss_scale", None)
        return scale


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
