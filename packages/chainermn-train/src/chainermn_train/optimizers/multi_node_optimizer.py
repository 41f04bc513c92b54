"""The multi-node optimizer: a Chainer optimizer that steps along the mean gradient of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any

import chainer

from chainermn_comm import CommunicatorBase
from chainermn_comm.watchdog import count_update

from ..background_thread import raise_if_any
from ..optimizer_state import (
    saved_value,
    serialize_masters,
    serialize_settings,
    serialize_state,
)
from ..wrappers import AttributeProxy
from .collective_update import CollectiveUpdate
from .divided_model import refuse_divided
from .exchanges import GradientExchange

_ARGUMENTS = frozenset(
    {
        "accumulate_steps",
        "communicator",
        "compression",
        "double_buffering",
        "on_drift",
        "overlap",
        "sharded",
        "zero_fill",
    }
)


class MultiNodeOptimizer(AttributeProxy):
    """A Chainer optimizer whose :meth:`update` steps along the mean gradient of all ranks.

    It is made by :func:`create_multi_node_optimizer` (not collective), which explains
    and checks the arguments.

    All other attributes and methods are those of ``actual_optimizer``, for reading and
    for setting: hyperparameters, hooks, ``target``, ``t`` and so on. Hooks therefore see
    the mean gradient.

    The class is not a subclass of :class:`chainer.Optimizer`, whose class attributes
    would hide those of the actual optimizer. Chainer's updaters, extensions and
    serializers don't need a subclass.

    A copy, shallow or deep, has the same communicator. Pickling raises TypeError.

    Attributes:
        actual_optimizer: the optimizer that steps.
        communicator: the ranks that train together.
        zero_fill: whether a missing gradient counts as zeros.
    """

    _OWN = frozenset({"actual_optimizer", "communicator", "zero_fill", "_updates"})
    _ACTUAL = "actual_optimizer"

    def __init__(
        self,
        actual_optimizer: Any,
        communicator: CommunicatorBase,
        arguments: dict[str, Any],
        exchange: GradientExchange,
    ) -> None:
        """Use ``exchange``; ``arguments`` must be equal on all ranks."""
        self.actual_optimizer = actual_optimizer
        self.communicator = communicator
        self.zero_fill = arguments["zero_fill"]
        self._updates = CollectiveUpdate(
            actual_optimizer, communicator, arguments, exchange
        )

    @property
    def agreements(self) -> int:
        """How often ranks have agreed on what to do: the same on all ranks (not collective)."""
        return self._updates.agreements

    @property
    def sharded(self) -> bool:
        """Whether each rank has a part of the optimizer's state (not collective)."""
        return self._updates.exchange.is_sharded

    @property
    def is_warned(self) -> bool:
        """Whether a signal has warned a rank: after an update the same on all (not collective)."""
        return self._updates.is_warned

    @property
    def compression_error(self) -> float:
        """The norm of what PowerSGD has kept back on this rank so far (not collective)."""
        return self._updates.exchange.error_norm()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS and "_updates" in vars(self):
            raise AttributeError(
                f"{name!r} is an argument of create_multi_node_optimizer, which can't be "
                "changed afterwards; make another optimizer"
            )
        super().__setattr__(name, value)

    def setup(self, link: Any) -> MultiNodeOptimizer:
        """Set the model ``link``, as in Chainer, and return this optimizer.

        Gradients of another model that are in flight or added up are dropped.

        Raises:
            TypeError: ``link`` is no link.
            ValueError: the communicator's ranks hold the model in parts.
        """
        self.actual_optimizer.setup(link)
        refuse_divided(link, self.communicator)
        self._updates.forget()
        return self

    def __copy__(self) -> MultiNodeOptimizer:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        twin._updates = copy(self._updates)
        # Both have the same gradients left, and only this optimizer warns of them.
        twin._updates.warn_of_leftovers.detach()
        return twin

    def update(
        self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any
    ) -> None:
        """Update the parameters with the mean of all ranks' gradients (collective).

        If ``lossfun`` is given, the call computes gradients. It exchanges gradients, and
        the actual optimizer steps along their means, which are equal on all ranks. A
        rank without examples can take part by ``target.cleargrads()`` and then
        ``update()``: with ``zero_fill``, its gradients count as zeros.

        Ranks may start from different states, and may initialise, add or replace
        parameters later. All ranks get rank 0's state, as by :meth:`synchronize`, if
        the set of initialised parameters has changed on any rank since the last call,
        or if a step has raised on any rank, such as in a hook. Gradients that are in
        flight or added up are then dropped on every rank. There are two cases:

        - The set has changed on every rank, every rank passes ``lossfun``, and all
          parameters have values. Then the state travels before ``lossfun`` is called,
          and the update counts.
        - In any other case the gradients belong to parameters that ranks didn't share,
          and the call *does not step* (``t`` stays). So the first call doesn't step
          with lazily initialised links, such as ``L.Linear(None, 10)``, or without a
          loss function.

        If states differ between ranks for other reasons, ``on_drift`` of
        :func:`create_multi_node_optimizer` says what happens. After a link was added or
        replaced, call :meth:`setup` on all ranks.

        With double buffering, the call steps along the gradients of the call before,
        while its own gradients travel; the first call doesn't step. With ``overlap``,
        gradients travel while backward computes more gradients, and the call steps
        along its own gradients. With ``accumulate_steps=k``, every k-th call exchanges
        and steps, and only the first and the last of k calls are collective.
        :meth:`flush` uses the gradients that are left.

        Gradients of parameters that are not updated
        (:meth:`chainer.Link.disable_update`) are dropped and don't travel. Hooks see
        zeros in their place.

        Args:
            lossfun: called with ``args`` and ``kwds``; returns the variable whose
                gradients are computed. None if the gradients are there already.
            args: arguments of ``lossfun``.
            kwds: keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: :meth:`setup` has not been called on this rank (PeerError on
                the others); or an update of a model in parts has failed, see below.
            ValueError: the optimizer is ``sharded``, and a rule or hook isn't known to
                compute each element by itself.
            RankMismatchError: ranks have different optimizers, loss scales or
                arguments; some ranks flush; states have drifted apart; or, without
                ``zero_fill``, ranks lack different gradients (with double buffering on
                a communicator of another library, the next call raises this error).
            BaseException: whatever ``lossfun`` or its backward raises on this rank
                (PeerError on the others). No rank steps then, and all may go on with
                the next update. Between the first and the last of ``accumulate_steps``
                calls, the error is raised on this rank alone, and the others count one
                gradient less. If ranks of another communicator hold other parts of the
                model, let the error end the job: these ranks don't know of it, so the
                next collective update raises RuntimeError (PeerError on the others).
                All ranks may go on after they have loaded a checkpoint; or after
                :meth:`synchronize`, if all ranks of the model have skipped the update.
                If the optimizer is ``sharded`` and new values couldn't travel to other
                machines, reading them and all updates raise this error, until all ranks
                call :meth:`synchronize`.
        """
        compute_loss = None
        if lossfun is not None:
            compute_loss = partial(lossfun, *args, **kwds)
        with self._updates.recording_failures():
            self._updates.update(compute_loss)
        count_update(_num_examples(*args, *kwds.values()))

    def flush(self) -> None:
        """Step along the gradients that no step has used yet (collective).

        Gradients in flight, with double buffering, make a step. Gradients that have been
        added up on any rank, of fewer updates than ``accumulate_steps``, make another
        step along their mean. If no gradients are left, the call does nothing. All ranks
        call this method when training ends, such as after ``trainer.run()``, or at the
        end of an epoch whose examples must all count before the next epoch. In the cases
        in which :meth:`update` gives rank 0's state to all and drops gradients, this
        method does so, too. An optimizer that ends with gradients left warns on rank 0.

        Raises:
            RankMismatchError: other ranks have made another number of updates, and call
                :meth:`update`; or as :meth:`update` raises it.
            BaseException: the error of the exchange in flight.
        """
        with self._updates.recording_failures():
            self._updates.flush()

    def synchronize(self) -> None:
        """Give rank 0's state to all ranks (collective); the first update does so by itself.

        The state has parameters, persistent values such as batch statistics, the
        optimizer's state, its ``t`` and its loss scale, and after the first update its
        hyperparameters. If rank 0 lacks a value, the first rank that has one gives it.
        Gradients that are in flight or added up are dropped.

        Raises:
            RuntimeError: :meth:`setup` has not been called on this rank (PeerError on
                the others).
            RankMismatchError: names of parameters differ, or other ranks make another
                call.
        """
        self._updates.synchronize()

    def finalize(self) -> None:
        """Wait for the exchange in flight and free its communicator (collective).

        Only an optimizer whose gradients travel during computing has anything to free,
        and only a program that makes many optimizers needs this call. The communicator
        that the user passed stays theirs. An error of the exchange is not raised.

        Raises:
            RankMismatchError: other ranks make another call.

        Warns:
            RuntimeWarning: on rank 0, if gradients are left that no step has used. The
                warning also comes when an optimizer is garbage-collected.
        """
        self._updates.exchange.close(self._updates.signature)
        self._updates.warn_of_leftovers()

    def serialize(self, serializer: Any) -> None:
        """Save or load the optimizer's state, as :meth:`chainer.Optimizer.serialize` does.

        Not collective. Beyond Chainer's own entries, the state has the optimizer's
        class, the numbers that update rules keep outside their state, the means of
        gradients in flight (equal on all ranks), gradients that were added up (each
        rank's own), a dynamic loss scale, and the float32 parameters of
        :meth:`use_fp32_update`. So a resumed training goes on with the same bits. A
        snapshot of Chainer's own optimizer can be loaded, too. After loading, the next
        update gives rank 0's state to all; see :meth:`assume_synchronized`.

        Raises:
            ValueError: the snapshot is of another class of optimizer, or holds gradients
                that this optimizer, with other ``double_buffering`` or
                ``accumulate_steps``, can't use.
            RuntimeError: each rank has a part of the state, and this rank saves alone.
            BaseException: the error of the exchange in flight; the next collective call
                raises it again, on all ranks.
        """
        optimizer = self.actual_optimizer
        exchange = self._updates.exchange
        target = optimizer.target
        comm = self.communicator
        is_loaded = isinstance(serializer, chainer.Deserializer)
        if is_loaded:  # also where it fails midway
            self._updates.forget()
        exchange.refuse_parts()
        own = serializer["chainermn"]
        serialize_settings(optimizer, own)
        serialize_state(optimizer, serializer)
        # A snapshot of Chainer's own optimizer has nothing else.
        if is_loaded and saved_value(own, "in_flight") is None:
            return
        raise_if_any(exchange.failure())
        pending = exchange.pending
        if pending is not None and not pending.is_of(target):
            pending = None  # of a link that was replaced
        has_pending = own("in_flight", int(pending is not None))
        if has_pending and is_loaded:
            exchange.load_pending(own["means"], target)
        elif pending is not None:
            pending.save(own["means"])
        serialize_masters(optimizer, own["masters"])
        self._updates.accumulation.serialize(
            own["accumulation"], target, comm.rank, comm.size
        )
        exchange.serialize(own["compression"], target)

    def whole_states(self) -> AbstractContextManager[None]:
        """Return a block in which update rules have their whole states (collective).

        Checkpoints need the block if the optimizer is ``sharded``, and each rank has
        parts of the states. The states take the memory of all parts on each rank.

        Raises:
            RankMismatchError: where the block begins, other ranks do something else.
        """
        return self._updates.exchange.whole_states(self.actual_optimizer)

    def assume_synchronized(self) -> None:
        """Declare that ranks have equal states, so that the next update doesn't send rank 0's.

        Not collective. The method is for programs that load equal states on all ranks,
        as ``maybe_load`` of a checkpointer does. If one rank doesn't call it, the next
        update gives rank 0's state to all nevertheless.

        Raises:
            RuntimeError: :meth:`setup` has not been called.
        """
        refuse_divided(self.target, self.communicator)
        self._updates.state.assume(self.target)


def _num_examples(*batch: Any) -> int:
    """Return the length of a loss function's first argument; 0 if it has none."""
    try:
        return len(batch[0])
    except (IndexError, TypeError):
        return 0
