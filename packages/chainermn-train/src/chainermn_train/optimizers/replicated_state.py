"""Parameters, persistent values and optimizer state, which are the same on all ranks."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_together
from ..optimizer_state import broadcast_state, describe_settings, loss_scaling
from ..persistents import broadcast_persistents
from ..profiling import region
from ..wrappers import UnpicklableMixin
from .decision import OPERATION, Report
from .parameter_set import ParameterSet, initialize_missing


class ReplicatedState(UnpicklableMixin):
    """Knows what is the same on all ranks, and makes it so."""

    def __init__(
        self, communicator: CommunicatorBase, settings: dict[str, Any]
    ) -> None:
        self._communicator = communicator
        # Arguments of the optimizer that must be equal on all ranks.
        self._settings = settings
        # Parameters that all ranks have in the same state.
        self.shared: ParameterSet | None = None
        # Whose gradients this rank has loaded since.
        self._loaded: ParameterSet | None = None
        self.is_apart = False  # whether it may not have stepped as the others did
        self._scaling: tuple[Any, ...] | None = None

    def report(self, optimizer: Any) -> Report | None:
        """Return what ranks must know of before the loss; None if nothing has changed.

        That the last step failed here they learn after backward, as others may
        communicate in their loss by now.
        """
        target, shared, loaded = optimizer.target, self.shared, self._loaded
        is_rescaled = self._scaling != loss_scaling(optimizer)
        if shared is not None and shared.is_still_of(target):
            return Report(rescaled=1) if is_rescaled and not self.is_apart else None
        changed = bool(shared or (loaded and not loaded.has_parameters_of(target)))
        return Report(
            unshared=int(not changed),
            changed=int(changed),
            cannot_count=int(ParameterSet(target).has_uninitialized),
            rescaled=int(is_rescaled),
        )

    def has_initialized(self, target: Any) -> bool:
        """Return whether a parameter got its first value since ranks shared the others."""
        shared = self.shared
        return shared is None or (
            shared.has_uninitialized and not shared.is_still_of(target)
        )

    def compare_settings(self, optimizer: Any, total: Report, num_calls: int) -> None:
        """Raise RankMismatchError if ranks are set differently, or out of step (collective)."""
        are_shared = not (total.changed or total.unshared)
        settings = {**self._settings, **describe_settings(optimizer, are_shared)}
        settings["updates of a step so far"] = num_calls if are_shared else None
        self._communicator.handshake("create_multi_node_optimizer", settings.items())
        self.note_scaling(optimizer)

    def synchronize(self, optimizer: Any) -> None:
        """Give rank 0's parameters, persistent values and optimizer state to all (collective).

        What rank 0 has no value for comes from the first rank that has one. If settings
        were equal once, they are rank 0's again.
        """
        target, communicator = optimizer.target, self._communicator
        self.shared = self._loaded = None  # also where it fails midway
        with region("communication"), raise_together(communicator.handshake, OPERATION):
            initialize_missing(communicator, target)  # others' communicators want that
            communicator.bcast_data(target)
            broadcast_persistents(communicator, target)
            # Settings that were never compared are compared by the next update.
            were_compared = self._scaling is not None
            broadcast_state(communicator, optimizer, with_settings=were_compared)
        if were_compared:
            self.note_scaling(optimizer)
        self.assume(target)

    def has_noted(self, optimizer: Any) -> bool:
        """Return whether all ranks are known to scale their losses as this one does."""
        return self._scaling == loss_scaling(optimizer)

    def note_scaling(self, optimizer: Any) -> None:
        """Record that all ranks scale their losses alike now."""
        self._scaling = loss_scaling(optimizer)

    def assume(self, target: Any) -> None:
        """Record that all ranks have the same state now, unless loaded gradients are of another."""
        if self._loaded is None or self._loaded.has_parameters_of(target):
            self.shared, self._loaded, self.is_apart = ParameterSet(target), None, False

    def forget(self, target: Any = None) -> None:
        """Record that this rank may have another state than the others.

        It has loaded one, with gradients of the parameters that ``target`` has now.
        """
        self.shared, self._loaded = (
            None,
            None if target is None else ParameterSet(target),
        )
        self.is_apart = False
