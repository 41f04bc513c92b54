"""The multi-node optimizer: a Chainer optimizer that steps along the mean gradient of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainermn_comm import CommunicatorBase

from .accumulation import Accumulation
from .agreement import gather_or_raise, told_with
from .copying import SharesCommunicator
from .double_buffering import DoubleBuffer
from .forwarding import Forwarding
from .held import HeldGradients
from .losses import compute_gradients, scale_missing_gradients
from .shared_parameters import SharedParameters, raise_out_of_step
from .state import serialize_state
from .timing import part


class MultiNodeOptimizer(Forwarding, SharesCommunicator):
    """A Chainer optimizer whose :meth:`update` steps along the mean gradient of all ranks.

    Every other attribute and method is that of ``actual_optimizer``, to read and to set:
    hyperparameters, hooks, ``target``, ``t`` and so on. Hooks therefore see the mean gradient.

    It is not a subclass of :class:`chainer.Optimizer`, whose class attributes would hide
    the actual optimizer's; Chainer's updaters, extensions and serializers don't ask for one.

    A copy, shallow or deep, has the same communicator. It can't be pickled (TypeError).

    Attributes:
        actual_optimizer: the optimizer that steps.
        communicator: the ranks that train together.
        zero_fill: whether a missing gradient counts as zeros.
    """

    _OWN = frozenset(
        {"actual_optimizer", "communicator", "zero_fill", "_shared", "_group", "_buffer"}
    )

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
        self._shared = SharedParameters(communicator, settings)
        self._group = Accumulation(accumulate_steps)
        self._buffer = DoubleBuffer(communicator, zero_fill) if double_buffering else None

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
        if self._group.is_middle:
            self._add_alone(lossfun, args, kwds)
            return
        shared, optimizer = self._shared, self.actual_optimizer
        views = shared.agree(optimizer, lossfun is None)
        if views.apart:
            raise_out_of_step(self.communicator, "update", self._group.calls, self._group.steps)
        changed, incomplete = views.changed, views.incomplete
        if changed and not incomplete and not views.without_loss:
            self._broadcast()
            changed = False
        terms = self._compute_gradients_or_raise(lossfun, args, kwds, views.without_loss)
        if incomplete and not changed:  # the loss may have initialised what was missing
            changed, incomplete, *_ = shared.agree(optimizer, False)
        if changed:
            shared.initialize_as_others_did(optimizer.target)
            self._broadcast()
            return
        scale_missing_gradients(self.actual_optimizer)
        if self._is_plain:
            self._exchange_and_step()
            return
        ends = self._group.is_last
        self._group.add(HeldGradients.taken_from(optimizer.target))
        if ends:
            self._exchange((terms + self.communicator.size) / self.communicator.size)

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
        terms = self._agree_on_failures(None, self._buffer, flushing=True)
        if self._buffer is not None:
            self._step_along(self._buffer.pop())
        if not terms:
            self._group.drop()
            return
        self._exchange(terms / self.communicator.size)
        if self._buffer is not None:
            self.flush()

    def finalize(self) -> None:
        """Wait for the exchange in flight and free the communicator it used (collective).

        Only with double buffering there is anything to do, and only a program that makes many
        optimizers needs to. The communicator that the user gave stays theirs.
        """
        if self._buffer is not None:
            self._buffer.close()

    def serialize(self, serializer: Any) -> None:
        """Save or load the optimizer's state, as :meth:`chainer.Optimizer.serialize` does.

        Beyond what Chainer saves: gradients in flight (it waits for their means, which are
        equal on all ranks) and those added up so far (each rank's own), a dynamic loss scale,
        and the float32 parameters of :meth:`use_fp32_update`. So training that resumes goes on
        with the same bits. What a snapshot of Chainer's own optimizer lacks is left out.

        Raises:
            ValueError: the snapshot holds gradients that this optimizer, with other
                ``double_buffering`` or ``accumulate_steps``, has no use for.
            BaseException: what made the exchange in flight fail.
        """
        serialize_state(
            self.actual_optimizer, self._group, self._buffer, self.communicator, serializer
        )

    def assume_synchronized(self) -> None:
        """Say that all ranks have the same parameters: the next update won't broadcast them.

        For who loads them on every rank and has made sure that they are equal, as
        ``maybe_load`` of a checkpointer does. Not collective; if a rank doesn't say so, the
        next update broadcasts all the same.
        """
        self._shared.note_parameters(self.target)

    def _add_alone(self, lossfun: Callable[..., Any] | None, args: Any, kwds: Any) -> None:
        """An update in the middle of its group, of which other ranks needn't know."""
        try:
            if lossfun is not None:
                compute_gradients(self.actual_optimizer, lossfun, args, kwds)
            scale_missing_gradients(self.actual_optimizer)
        except BaseException:
            self._group.skip()
            raise
        self._group.add(HeldGradients.taken_from(self.target))

    def _compute_gradients_or_raise(
        self, lossfun: Callable[..., Any] | None, args: Any, kwds: Any, without_loss: int
    ) -> int:
        """Compute the gradients where there is a loss function; raise where any fails (collective).

        The error stays in its own rank until all know of it: else a caller that catches it,
        to skip a batch, would be one collective call ahead of the other ranks. So does one of
        the exchange in flight.

        Returns:
            How many updates' gradients all ranks together have added up before.
        """
        error: BaseException | None = None
        if lossfun is not None:
            try:
                compute_gradients(self.actual_optimizer, lossfun, args, kwds)
            except BaseException as exception:
                error = exception
        if self._is_plain and without_loss == self.communicator.size:
            return 0
        try:
            return self._agree_on_failures(error, self._buffer if self._group.is_last else None)
        finally:
            del error  # else a cycle through its traceback would keep the batch's memory

    @property
    def _is_plain(self) -> bool:
        """Whether every update exchanges and uses its own gradients."""
        return self._group.steps == 1 and self._buffer is None

    def _agree_on_failures(
        self, error: BaseException | None, buffer: DoubleBuffer | None, flushing: bool = False
    ) -> int:
        """Raise where a rank has an error, or the exchange in flight failed (collective).

        Returns:
            How many updates' gradients all ranks together have added up.
        """
        with part("wire"):
            lost = None if buffer is None else buffer.wait()
        try:
            numbers = self._group.terms, error is not None, lost is not None
            with told_with(error or lost):
                if flushing:
                    found, apart = self._shared.count_at_flush(*numbers)
                else:
                    found, apart = self._shared.count(*numbers), False
            if apart:
                raise_out_of_step(self.communicator, "flush", self._group.calls, self._group.steps)
            if buffer is not None and found[2]:
                buffer.pop()
            if found[1] or found[2]:
                gather_or_raise(self.communicator, error or lost)
            return int(found[0])
        finally:
            del error, lost

    def _exchange(self, terms_per_rank: float) -> None:
        """Exchange what has been added up (collective), and step along it or the one before."""
        gradients = self._group.pop(self.target, terms_per_rank)
        if self._buffer is None:
            gradients.give_to(self.target)
            self._exchange_and_step()
            return
        arrived = self._buffer.pop()
        self._buffer.start(gradients)
        self._step_along(arrived)

    def _exchange_and_step(self) -> None:
        with part("wire"):
            self.communicator.multi_node_mean_grad(self.target, self.zero_fill)
        self._step()

    def _step_along(self, means: HeldGradients | None) -> None:
        if means is not None:
            means.give_to(self.target)
            self._step()

    def _step(self) -> None:
        try:
            self.actual_optimizer.update()
        except BaseException:  # a hook's, say; this rank may not have stepped as the others did
            self._shared.forget()
            raise
        self._shared.note_loss_scaling(self.actual_optimizer)  # it may have changed, on all ranks

    def _broadcast(self) -> None:
        """Give rank 0's parameters to all ranks (collective)."""
        if not self._is_plain:  # gradients of parameters that are gone must not move new ones
            new = self._shared.broadcast_new(self.target)
            self._group.forget(new)
            if self._buffer is not None:
                self._buffer.forget(new)
        self._shared.broadcast(self.target)
