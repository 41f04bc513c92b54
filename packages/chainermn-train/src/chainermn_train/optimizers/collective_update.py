"""The updates of one multi-node optimizer: ranks compute gradients, agree, and step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from chainermn_comm import CommunicatorBase, Reducer

from ..collective_errors import raise_together
from ..leaving import is_warned
from ..slots import scaling_checksum
from .accumulation import Accumulation
from .agreement import OPERATION, Action, Row, exchange_rows, settle
from .exchanges import GradientExchange
from .gradient_clipping import (
    StartAgainError,
    refuse_hooks_by_norm,
    starts_again,
    tell_waiting_ranks,
)
from .gradient_set import drop_unused, rescale, zero_gradients
from .join_block import current_block
from .leftovers import warn_of_leftovers
from .parameter_set import ParameterSet
from .shared_state import OUT_OF_STEP, SharedState

UPDATE = "update()"
FLUSH = "flush()"
# The numbers of further optimizers of each communicator.
_numbers: WeakKeyDictionary[CommunicatorBase, Iterator[int]] = WeakKeyDictionary()


class CollectiveUpdate:
    """Updates the parameters of a Chainer optimizer together with the other ranks.

    A copy is another optimizer for the other ranks.

    Attributes:
        agreements: how often ranks have agreed on what to do, the same on all ranks.
        is_warned: whether a signal has warned any rank; after an update the same on all.
        exchange: turns gradients into means; holds gradients that no step has used.
        accumulation: gradients that were added up since the last step.
        state: the state that is equal on all ranks.
        signature: identifies the optimizer; compared in each collective call.
        warn_of_leftovers: warns once, at the latest when Python ends.
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
        self.agreements = 0
        self.is_warned = False
        self.exchange = exchange
        self.accumulation = Accumulation(arguments["accumulate_steps"])
        self.state = SharedState(communicator, arguments)
        self._become_another()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._become_another()

    def _become_another(self) -> None:
        """Take a number that no other optimizer of this communicator has, and arrange a warning.

        Optimizers have numbers in the order in which they are made or copied.
        """
        number = next(_numbers.setdefault(self._communicator, count(1)))
        text = f"number {number} ({type(self._optimizer).__name__})"
        self.signature = (("optimizer, by creation", text),)
        self.warn_of_leftovers = weakref.finalize(
            self,
            warn_of_leftovers,
            self._communicator,
            self.accumulation,
            self.exchange,
        )

    @contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Record whether an update raises an error in the block, perhaps after its loss began.

        The ranks of the optimizer know of it, and may go on. Ranks that hold other
        parts of the model don't.
        """
        try:
            yield
        except BaseException:
            if self._params.parts:
                self.state.has_failed = True
                self.state.params = None  # ranks agree before the next loss
            raise

    def update(self, compute_loss: Callable[[], Any] | None) -> None:
        """Do what :meth:`MultiNodeOptimizer.update` does (collective)."""
        if self.accumulation.is_between:  # no other rank knows of this update
            self.accumulation.num_calls += 1
            if compute_loss is not None:
                loss = compute_loss()
                self._optimizer.target.cleargrads()
                self.exchange.backward(self._params, loss, self._scale)
            drop_unused(self._params)
            self._add(1)
            return
        block = current_block.get()
        if block is not None and self in block.optimizers:
            block.begin_update(self)
        self._update_together(partial(self._compute_and_step, UPDATE, compute_loss, 1))

    def update_without_examples(self) -> None:
        """Take part in the next collective update of other ranks (collective)."""
        while self.accumulation.is_between:
            self.accumulation.num_calls += 1
        with self._raising_together():
            zero_gradients(self._params)
        self._update_together(partial(self._compute_and_step, UPDATE, None, 0))

    def flush(self) -> None:
        """Do what :meth:`MultiNodeOptimizer.flush` does (collective)."""
        self._update_together(partial(self._compute_and_step, FLUSH, None, 0))
        # No rank waits for another rank here, because a hook may fail on some ranks.
        self._update_together(partial(self._step, self.exchange.assign_pending))

    def synchronize(self) -> None:
        """Do what :meth:`MultiNodeOptimizer.synchronize` does (collective)."""
        self._communicator.handshake("synchronize", self.signature)
        self._share()

    def forget(self) -> None:
        """Drop all gradients and all facts about other ranks, because this rank's state is new."""
        self.state.forget()
        self._drop_gradients()
        self.exchange.forget_states()

    def _update_together(self, update: Callable[[], None]) -> None:
        """Make an update, or drop all gradients if ranks that hold the model start again."""
        if starts_again(self._optimizer, update):
            self._drop_gradients()

    def _compute_and_step(
        self, call: str, compute_loss: Callable[[], Any] | None, num_present: int
    ) -> None:
        """Compute gradients, agree, and do what all ranks do (collective).

        The present gradients are then those of one update, or of none. StartAgainError is
        raised on all ranks after rank 0's state was given to all.
        """
        exchange = self.exchange
        rows: list[Row] = []
        try:
            # Else this rank has gradients of the state that it had.
            can_share_first = compute_loss is not None or num_present == 0
            action = self._agree_before_loss(call, can_share_first)
            if compute_loss is not None:
                action = self._compute_gradients(compute_loss, action)
            if action is Action.GO_ON:
                action, rows = self._agree_on_gradients(call, num_present)
            if action is Action.RESEND:
                exchange.cancel()
                action, rows = self._agree_on_gradients(call, num_present)
        except BaseException:
            exchange.cancel()
            raise
        if action is Action.START_AGAIN:
            exchange.cancel()
            # Some ranks have computed their loss since all agreed. If the loss has failed
            # on one of them, all ranks raise here.
            self._communicator.handshake(OPERATION)
            self._share()
            raise StartAgainError
        if call == UPDATE and not self.accumulation.is_last:
            self.accumulation.num_calls += 1
            self._add(num_present)
        elif any([row.num_added for row in rows]):
            self._step(partial(self._exchange_gradients, rows))
        else:  # nothing was added up: at a flush, or every update has failed
            exchange.cancel()
            self.accumulation.clear()

    def _agree_before_loss(self, call: str, can_share_first: bool) -> Action:
        """Agree now if this rank's state may differ (collective).

        Ranks that know of no difference agree after their loss. A failed step is reported
        only after backward, because other ranks may already be communicating inside
        their loss.
        """
        action = Action.GO_ON
        params = self.state.params
        if params is None or not params.is_still_of(self._optimizer.target):
            self.state.params = None
            action, _ = self._agree(call, can_share_first=can_share_first)
        if action is Action.SHARE:
            self._share()
            action = Action.GO_ON
        return action

    def _compute_gradients(
        self, compute_loss: Callable[[], Any], action: Action
    ) -> Action:
        """Compute gradients, which may leave meanwhile if ranks agree to it before backward.

        A rank raises its error only after all ranks know of it. Otherwise a caller that
        catches the error, to skip a batch, would be one collective call ahead of others.
        """
        exchange = self.exchange
        params = self._params
        with self._raising_together():
            loss = compute_loss()
            self._optimizer.target.cleargrads()
            scale = self._scale
            # If the state is about to be shared, parameters may have no values yet.
            if action is not Action.GO_ON or not exchange.can_send(params, loss):
                exchange.backward(params, loss, scale)
                return action
        action, _ = self._agree(UPDATE, can_send=True)
        with self._raising_together():
            sends = action is Action.GO_ON
            exchange.backward(params, loss, scale, sends)
        return action

    def _agree_on_gradients(
        self, call: str, num_present: int
    ) -> tuple[Action, list[Row]]:
        """Agree, by the reducer of the gradients if a step follows (collective)."""
        accumulation = self.accumulation
        params = self._params
        scale = self._scale
        is_step = accumulation.is_last
        if call == FLUSH:
            is_step = accumulation.num_calls > 0
        else:
            drop_unused(params)
        reducer = None
        if is_step and not self.state.needs_sharing():
            with self._raising_together():
                if accumulation.steps > 1:
                    accumulation.assign_mean(params, scale, call == UPDATE)
                else:
                    rescale(params, scale)
            reducer = self.exchange.reducer_of(params, scale)
        num_added = accumulation.num_accumulated + num_present
        return self._agree(call, reducer, num_added)

    def _agree(
        self,
        call: str,
        reducer: Reducer | None = None,
        num_added: int = 0,
        can_share_first: bool = False,
        can_send: bool = False,
    ) -> tuple[Action, list[Row]]:
        """Return what all ranks do, and their rows (collective).

        If ranks can't go on, all raise an error. If they go on, the drift detector
        looks at the next part of the state in the next call.
        """
        exchange = self.exchange
        num_calls = self.accumulation.num_calls
        if call == FLUSH:  # a flush works after any number of updates
            num_calls = min(num_calls, 1)
        with self._raising_together():
            params = self._params
            if params.parts and self.state.has_failed:
                raise RuntimeError(OUT_OF_STEP)
            refuse_hooks_by_norm(self._optimizer, params.parts)
            exchange.wait()
            row = Row(
                needs_sharing=self.state.needs_sharing(),
                can_share_first=can_share_first and not params.uninitialized,
                can_send=can_send,
                can_plan=exchange.can_plan,
                in_flight=exchange.pending is not None,
                is_warned=is_warned(),
                num_calls=num_calls,
                num_added=num_added,
                scaling=scaling_checksum(self._optimizer),
                checksum=self.state.checksum(self._optimizer, exchange.has_changed),
            )
        if reducer is None:
            reducer = exchange.make_reducer()
        settings = self.state.settings(self._optimizer)
        signature = (*self.signature, ("call", call), *settings)
        rows = exchange_rows(reducer, signature, row)
        self.state.has_equal_settings = True
        self.agreements += 1
        action = settle(rows)
        if action is Action.COMPARE:
            action = Action.START_AGAIN
            if not self.state.compare(self._optimizer, rows):
                action = settle(rows, were_compared=True)
        self.is_warned = any([row.is_warned for row in rows])
        if self.is_warned:
            self.warn_of_leftovers.detach()  # a job that leaves saves them
        if action in (Action.GO_ON, Action.RESEND):
            self.state.drift.advance()
        return action, rows

    def _exchange_gradients(self, rows: list[Row]) -> bool:
        """Exchange gradients (collective); return whether there are means to step along."""
        num_added = sum([row.num_added for row in rows])
        factor = self.accumulation.steps * len(rows) / num_added
        self.accumulation.clear()
        try:
            return self.exchange.finish(self._params, self._scale, factor)
        finally:  # all ranks plan, even if the exchange fails
            if all([row.can_plan for row in rows]):
                self.exchange.plan(self._params)

    def _step(self, assign_means: Callable[[], bool]) -> None:
        """Let gradients be means, and step along them if there are any."""
        try:
            if assign_means():
                self.exchange.step(self._optimizer, self._params)
        except StartAgainError:  # raised before the step
            raise
        except BaseException as error:
            self.state.has_failed = self.exchange.may_have_stepped
            tell_waiting_ranks(self._optimizer, error)
            raise

    def _add(self, num_updates: int) -> None:
        """Add the present gradients, of ``num_updates`` updates, to the sums."""
        try:
            self.accumulation.add(self._params, num_updates)
        except BaseException:  # midway, so this rank's sums are wrong
            self.state.has_failed = True
            raise

    def _share(self) -> None:
        """Drop gradients, and give rank 0's state to all (collective)."""
        self._drop_gradients()
        self.exchange.gather_states(self._optimizer)
        self.state.share(self._optimizer)
        self.exchange.forget_states()

    def _drop_gradients(self) -> None:
        """Drop gradients that are added up or in flight."""
        self.accumulation.clear()
        self.exchange.drop()

    def _raising_together(self) -> raise_together:
        """Return a block in which all ranks raise if one does; else an agreement is to follow."""
        return raise_together(self._communicator.handshake, OPERATION, meet=False)

    @property
    def _params(self) -> ParameterSet:
        return self.state.params or ParameterSet(self._optimizer.target)

    @property
    def _scale(self) -> Any:
        return getattr(self._optimizer, "_loss_scale", None)
