"""An extension that combines the observations of all ranks, and reports the result on each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
from chainer import training

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, bcast_checked, require_communicator
from ..host_arrays import as_number, mean_of, to_host


class ObservationAggregator(training.Extension):
    """Combines a reported value over all ranks, so that each rank's ``LogReport`` sees the same.

    The extension runs at every iteration, after extensions that report values, such as
    evaluators, and before extensions that read them. It keeps values until
    ``comm_trigger`` fires. Then it combines the values of all ranks, and reports the
    result on every rank as the observation ``aggregated_key``. Ranks without values add
    nothing. If no rank has values, nothing is reported.

    If ``aggregated_key`` is ``original_key``, a rank's own value is removed from the
    observation when it is kept, so that no log mixes it with the result.

    Communication is collective, so ``comm_trigger`` must fire on all ranks at the same
    iterations. Kept values are part of the trainer's snapshot.

    Args:
        comm: the ranks.
        original_key: the name of the observation to combine, such as ``'main/loss'``.
            Its values are numbers, arrays of numbers or variables; with an
            ``aggregator``, any picklable objects.
        aggregated_key: the name of the result; ``original_key`` if None.
        comm_trigger: when to combine: a trigger, or a tuple such as ``(1, 'epoch')``.
        aggregator: a function that rank 0 calls with a list of lists: each rank's
            values in rank order, oldest first, with variables and GPU arrays as NumPy
            arrays. It returns the result, any picklable object. None for the mean of
            all values, which has their type: a float, a NumPy scalar or array on the
            host, or a variable, with the same dtype (float64 for integers).

    Raises:
        TypeError: ``comm`` is no communicator.
    """

    trigger = (1, "iteration")
    priority = training.PRIORITY_EDITOR

    def __init__(
        self,
        comm: CommunicatorBase,
        original_key: str,
        aggregated_key: str | None = None,
        *,
        comm_trigger: Any = (1, "iteration"),
        aggregator: Callable[[list[list[Any]]], Any] | None = None,
    ) -> None:
        self.comm = require_communicator(comm, "ObservationAggregator")
        self.original_key = original_key
        self.aggregated_key = original_key if aggregated_key is None else aggregated_key
        self.comm_trigger = training.get_trigger(comm_trigger)
        self.aggregator = aggregator
        # They are kept as observed: reading a number on a GPU would wait for its kernels.
        self._values: list[Any] = []

    def __call__(self, trainer: Any) -> None:
        """Keep this iteration's value; if ``comm_trigger`` fires, combine values (collective).

        Raises:
            TypeError: there is no aggregator, and this rank observed something that is
                neither a number nor an array of numbers (PeerError on the other ranks).
            BaseException: the aggregator's error, on rank 0 (PeerError on the other
                ranks).
        """
        observation = trainer.observation
        if self.original_key in observation:
            value = observation[self.original_key]
            # The copy stays as it is when the user's array changes.
            if isinstance(value, chainer.Variable):
                kept = chainer.Variable(value.array.copy(), requires_grad=False)
            else:
                kept = copy.copy(value)
            self._values.append(kept)
            if self.aggregated_key == self.original_key:
                del observation[self.original_key]
        if not self.comm_trigger(trainer):
            return
        try:
            ranks = allgather_checked(self.comm, "ObservationAggregator", self._on_host)
        finally:
            self._values = []
        if not any(ranks):
            return
        aggregator = self.aggregator
        if aggregator is None:
            # All ranks add up the same list, so they get the same bits.
            values = [value for rank in ranks for value in rank]
            result = mean_of(values, [1] * len(values))
        else:
            result = bcast_checked(
                self.comm, "ObservationAggregator", lambda: aggregator(ranks)
            )
        observation[self.aggregated_key] = result

    def _on_host(self) -> list[Any]:
        if self.aggregator is not None:
            return list(to_host(self._values))
        return [
            as_number(self.original_key, value, "the training loop")
            for value in self._values
        ]

    def serialize(self, serializer: Any) -> None:
        """Save or load the kept values and the state of ``comm_trigger``."""
        if hasattr(self.comm_trigger, "serialize"):
            self.comm_trigger.serialize(serializer["comm_trigger"])
        kept = serializer["values"]
        if isinstance(serializer, chainer.Serializer):
            serializer("count", len(self._values))
            for index, value in enumerate(self._values):
                kept(str(index), np.asarray(to_host(value)))
        else:
            self._values = [
                kept(str(index), None) for index in range(serializer("count", 0))
            ]
