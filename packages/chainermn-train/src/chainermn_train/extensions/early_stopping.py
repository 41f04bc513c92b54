"""A stop trigger that ends training on all ranks at once when a value no longer improves."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from chainer.training.triggers import EarlyStoppingTrigger

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, require_communicator
from ..host_arrays import to_host


class MultiNodeEarlyStoppingTrigger(EarlyStoppingTrigger):
    """Chainer's :class:`~chainer.training.triggers.EarlyStoppingTrigger` for all ranks together.

    Pass the trigger as ``stop_trigger`` to the :class:`~chainer.training.Trainer` of
    every rank. Each check compares the mean of all values that ranks have observed
    since the last check with the best mean so far, so all ranks make the same decision.
    Ranks that have observed nothing don't count. If no rank has observed anything, rank
    0 warns, and training goes on.

    Each call is collective (one small exchange). As soon as ``max_trigger`` fires on one
    rank, all ranks stop; as soon as ``check_trigger`` fires on one rank, all ranks
    check. So either may be a trigger that depends on the rank, such as a
    :class:`~chainer.training.triggers.TimeTrigger`.

    Unlike Chainer's trigger, it is saved with the trainer, so that a resumed training
    stops when an uninterrupted one would have stopped.

    Args:
        comm: the ranks.
        check_trigger: when to check: a trigger, or a tuple such as ``(1, 'epoch')``.
        monitor: the name of the observation to compare, such as
            ``'validation/main/loss'``; its values are numbers.
        patience: the number of checks in a row without a better mean after which
            training stops; None for 3. ``patients`` is its other name, as in Chainer.
        mode: ``'min'`` if smaller means are better, ``'max'`` if larger ones are;
            ``'auto'`` means ``'max'`` if ``monitor`` contains ``accuracy``.
        verbose: whether rank 0 prints a line when training stops early.
        max_trigger: when to stop in any case.
        suffix: added to ``monitor``, it is the name under which the compared mean is
            reported.

    Raises:
        TypeError: ``comm`` is no communicator.
    """

    best: float

    def __init__(
        self,
        comm: CommunicatorBase,
        check_trigger: Any = (1, "epoch"),
        monitor: str = "main/loss",
        patience: int | None = None,
        mode: str = "auto",
        verbose: bool = False,
        max_trigger: Any = (100, "epoch"),
        suffix: str = "_aggregated",
        **kwargs: Any,
    ) -> None:
        comm = require_communicator(comm, "MultiNodeEarlyStoppingTrigger")
        verbose = verbose and comm.rank == 0
        super().__init__(
            check_trigger, monitor, patience, mode, verbose, max_trigger, **kwargs
        )
        self.comm = comm
        self.suffix = suffix
        self._observed = 0  # number of values in the summary
        self._seen: Any = None  # the observation that was added last
        self._trainer: Any = lambda: None  # a weak reference to the trainer

    def __call__(self, trainer: Any) -> bool:
        """Return whether training should stop, the same on all ranks (collective).

        Raises:
            BaseException: the error of a trigger on this rank (PeerError on the other
                ranks).
        """
        self._trainer = weakref.ref(trainer)

        def triggers() -> tuple[bool, bool]:
            self._observe(trainer.observation)
            stops = bool(self._max_trigger(trainer))
            return stops, bool(self._interval_trigger(trainer))

        ranks = allgather_checked(self.comm, "MultiNodeEarlyStoppingTrigger", triggers)
        stops, checks = map(any, zip(*ranks, strict=True))
        if stops:
            return True
        if not checks:
            return False
        stop = self._check(trainer.observation)
        if stop and self.verbose:
            print(f"Epoch {trainer.updater.epoch}: early stopping")
        return stop

    def _observe(self, observation: dict[str, Any]) -> None:
        """Add an observation to the summary, once."""
        if self.monitor in observation and observation is not self._seen:
            self._summary.add({self.monitor: observation[self.monitor]})
            self._observed += 1
            self._seen = observation

    def _check(self, observation: dict[str, Any]) -> bool:
        """Compare the mean over ranks with the best so far (collective)."""
        ranks = allgather_checked(
            self.comm, "MultiNodeEarlyStoppingTrigger", self._mean_here
        )
        count = sum(count for _, count in ranks)
        if not count:
            if self.comm.rank == 0:
                warnings.warn(f"{self.monitor} is not in observation", stacklevel=3)
            return False
        # All ranks add up the same list in the same order, so they get the same bits.
        current = sum(mean * count for mean, count in ranks) / count
        observation[self.monitor + self.suffix] = current
        self._init_summary()
        self._observed = 0
        if self._compare(current, self.best):
            self.best = current
            self.count = 0
        else:
            self.count += 1
        return bool(self._stop_condition())

    def _mean_here(self) -> tuple[float, int]:
        """Return this rank's mean since the last check, and its number of values."""
        mean = self._summary.compute_mean().get(self.monitor, 0.0)
        return float(to_host(mean)), self._observed

    def serialize(self, serializer: Any) -> None:
        """Save or load the best mean, the used patience, and the observations since."""
        # A snapshot is taken within an iteration, before the trainer asks the stop
        # trigger. A run that resumes from it won't have this iteration's observation.
        trainer = self._trainer()
        if trainer is not None:
            self._observe(trainer.observation)
        self.count = serializer("count", self.count)
        self.best = serializer("best", self.best)
        self._observed = serializer("observed", self._observed)
        self._summary.serialize(serializer["summary"])
        triggers = {"check": self._interval_trigger, "max": self._max_trigger}
        for name, trigger in triggers.items():
            if hasattr(trigger, "serialize"):
                trigger.serialize(serializer[name])
