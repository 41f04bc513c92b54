"""The reducers of one communicator, each made when gradients first need it."""

from __future__ import annotations

from ..messaging.handshake import Agreement, prepare
from .plans import Ground, Plans, in_memory_only
from .reducer import Reducer


class Reducers:
    """One for gradients in host memory and one for those on GPUs."""

    def __init__(self, plans: Plans, ground: Ground, agreement: Agreement) -> None:
        """Make nothing yet: only later has the user chosen a device.

        Args:
            plans: which way gradients go.
            ground: what they are to be built on.
            agreement: of all ranks.
        """
        self._plans, self._ground, self._agreement = plans, ground, agreement
        self._made: dict[bool, Reducer] = {}
        # Whether gradients in host memory never leave it.
        self.in_memory_only = in_memory_only(plans.on_cpus, ground.topology)

    def __bool__(self) -> bool:
        """Whether gradients have travelled."""
        return bool(self._made)

    def made(self, on_gpu: bool) -> Reducer | None:
        """The reducer, if there is one already; all ranks have one or none has."""
        return self._made.get(on_gpu)

    def get(self, on_gpu: bool) -> Reducer:
        """The reducer, made if there is none (collective).

        Raises:
            PeerError: another rank couldn't make it; what stopped it is raised there.
        """
        if on_gpu not in self._made:
            plan = self._plans.on_gpus if on_gpu else self._plans.on_cpus
            reducer, problem = prepare(lambda: plan(self._ground))
            self._agreement("allreduce_grad, its first use", problem=problem)
            self._made[on_gpu] = reducer
        return self._made[on_gpu]

    def close(self) -> None:
        """Release what the reducers own (collective)."""
        for reducer in self._made.values():
            reducer.close()
        self._made.clear()

    def abandon(self) -> None:
        """Release what needs no other rank (not collective)."""
        for reducer in self._made.values():
            reducer.abandon()
        self._made.clear()
