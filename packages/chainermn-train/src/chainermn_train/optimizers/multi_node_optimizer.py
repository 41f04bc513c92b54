"""The multi-node optimizer: a Chainer optimizer that steps along the mean gradient of all ranks."""

from __future__ import annotations

from collections.abc import Callable
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
from .gradient_exchange import GradientExchange

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


class MultiNodeOptimizer(AttributeProxy):
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
        """How often ranks have agreed on what to do, alike on all ranks (not collective)."""
        return self._updates.agreements

    @property
    def is_warned(self) -> bool:
        """Whether a signal has warned any rank, alike on all after an update (not collective)."""
        return self._updates.is_warned

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ARGUMENTS and "_updates" in vars(self):
            raise AttributeError(
                f"{name!r} is an argument of create_multi_node_optimizer, which can't be "
                "changed afterwards; make another optimizer"
            )
        super().__setattr__(name, value)

    def setup(self, link: Any) -> MultiNodeOptimizer:
        """Set the model, ``link``, and return itself, or raise TypeError, as in Chainer.

        Gradients of another model, in flight or added up, are dropped. ValueError is
        raised if ranks of the communicator hold the model in parts.
        """
        self.actual_optimizer.setup(link)
        refuse_divided(link, self.communicator)
        self._updates.forget()
        return self

    def __copy__(self) -> MultiNodeOptimizer:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        twin._updates = copy(self._updates)
        # Both have the same gradients left, of which this one warns.
        twin._updates.warn_of_leftovers.detach()
        return twin

    def update(
        self, lossfun: Callable[..., Any] | None = None, *args: Any, **kwds: Any
    ) -> None:
        """Update the parameters with the mean of all ranks' gradients (collective).

        The call computes gradients, if ``lossfun`` is given, and exchanges them. Then
        the actual optimizer steps along their means, which are equal on all ranks. A
        rank that has no examples can take part by calling ``target.cleargrads()`` and
        then ``update()``: its gradients count as zeros (if ``zero_fill``).

        Ranks may start from different states, and may initialise, add or replace
        parameters later. All ranks get rank 0's state, as by :meth:`synchronize`, if
        the set of initialised parameters has changed on any rank since the last call,
        or if a step has raised on some rank (in a hook, say). Gradients in flight or
        added up are dropped on every rank then. There are two cases:

        - The set has changed on every rank, every rank gave ``lossfun``, and all
          parameters have values. Then the state travels before ``lossfun`` is called,
          and the update counts.
        - In any other case the gradients belong to parameters that ranks didn't share,
          and the call *does not step* (``t`` stays). So neither the first call with
          lazily initialised links, such as ``L.Linear(None, 10)``, nor the first call
          without a loss function steps.

        If ranks' states differ for other reasons, ``on_drift`` of
        :func:`create_multi_node_optimizer` says what happens. After a link was added or
        replaced, call :meth:`setup` on all ranks.

        With double buffering, the call steps along the gradients of the call before
        (the first doesn't step), while its own are on their way. With ``overlap``
        gradients leave while backward computes the others, and the call steps along its
        own. With ``accumulate_steps=k`` every k-th call exchanges and steps, and only
        the first and the last of k are collective. :meth:`flush` uses the gradients
        that are left.

        Gradients of parameters that are not updated
        (:meth:`chainer.Link.disable_update`) are dropped and don't travel: hooks see
        zeros in their place.

        Args:
            lossfun: called with ``args`` and ``kwds``; the gradients of the variable
                that it returns are computed. None if the gradients are there already.
            args: arguments of ``lossfun``.
            kwds: keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: :meth:`setup` has not been called on this rank (PeerError on
                the others); or an update of a model in parts has failed, see below.
            RankMismatchError: ranks have different optimizers, scale losses
                differently, were given different arguments, or some flush; their states
                have drifted apart; or, without ``zero_fill``, not all have the same
                gradients (with double buffering on another's communicator the next call
                says so).
            BaseException: whatever ``lossfun`` or its backward raises on this rank
                (PeerError on the others). No rank steps then, and all may go on with
                the next update. Between the first and the last of ``accumulate_steps``
                calls it is raised on this rank only, and the others count one gradient
                less. If ranks of another communicator hold other parts of the model,
                let the error end the job: these ranks don't know of it, so the next
                collective update raises RuntimeError (PeerError on the others). All
                ranks may go on after they have loaded a checkpoint; or after
                :meth:`synchronize`, if all ranks of the model have skipped the update.
        """
        compute_loss = None
        if lossfun is not None:
            compute_loss = partial(lossfun, *args, **kwds)
        try:
            self._updates.update(compute_loss)
        except BaseException:
            self._updates.state.record_failure(self.target)
            raise
        count_update(_num_examples(*args, *kwds.values()))

    def flush(self) -> None:
        """Use the gradients that no step has used yet (collective).

        Gradients in flight, with double buffering, make a step. Then gradients that
        have been added up on any rank, if fewer than ``accumulate_steps``, make another
        step along the mean of them all. If no gradients are left, the call does
        nothing. All ranks call this method when training ends, such as after
        ``trainer.run()``, or at the end of an epoch whose examples must all count
        before the next epoch. Where :meth:`update` would give rank 0's state to all and
        drop gradients, this method does so, too. An optimizer that ends with gradients
        left warns on rank 0.

        Raises:
            RankMismatchError: other ranks have made another number of updates, and
                update; or as :meth:`update` raises it.
            BaseException: the error of the exchange in flight.
        """
        self._updates.flush()

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
        self._updates.synchronize()

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
        self._updates.exchange.close(self._updates.signature)
        self._updates.warn_of_leftovers()

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
            BaseException: what made the exchange in flight fail; the next collective
                call raises it again, on all ranks.
        """
        optimizer = self.actual_optimizer
        exchange = self._updates.exchange
        target = optimizer.target
        comm = self.communicator
        is_loaded = isinstance(serializer, chainer.Deserializer)
        if is_loaded:  # also where it fails midway
            self._updates.forget()
        own = serializer["chainermn"]
        serialize_settings(optimizer, own)
        serialize_state(optimizer, serializer)
        if (
            is_loaded and saved_value(own, "in_flight") is None
        ):  # Chainer's own snapshot
            return
        raise_if_any(exchange.failure())
        pending = exchange.pending
        if pending is not None and not pending.is_of(target):
            pending = None  # of a link that was replaced
        has_pending = bool(own("in_flight", int(pending is not None)))
        if has_pending and is_loaded:
            exchange.load_pending(own["means"], target)
        elif pending is not None:
            pending.save(own["means"])
        serialize_masters(optimizer, own["masters"])
        self._updates.accumulation.serialize(
            own["accumulation"], target, comm.rank, comm.size
        )

    def assume_synchronized(self) -> None:
        """Say that all ranks have the same state: the next update won't give them rank 0's.

        For users who load it on every rank and have made sure that they are equal, as
        ``maybe_load`` of a checkpointer does. Not collective; if a rank doesn't say so,
        the next update does so all the same. Before :meth:`setup` it raises
        RuntimeError.
        """
        refuse_divided(self.target, self.communicator)
        self._updates.state.assume(self.target)


def _num_examples(*batch: Any) -> int:
    """Return the length of a loss function's first argument; 0 if it has none."""
    try:
        return len(batch[0])
    except (IndexError, TypeError):
        return 0
