"""Parameters, persistent values and optimizer state, which are the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_on_all_ranks, values_of_first_holders
from ..parameter_set import ParameterSet
from ..persistents import broadcast_persistents
from ..profiling import region
from ..wrappers import UnpicklableMixin
from .decision import OPERATION, Report
from .optimizer_state import broadcast_state, describe_settings, loss_scaling


class ReplicatedState(UnpicklableMixin):
    """Knows what is the same on all ranks, and makes it so."""

    def __init__(self, communicator: CommunicatorBase, settings: dict[str, Any]) -> None:
        self._communicator = communicator
        self._settings = settings  # arguments of the optimizer that must be equal on all ranks
        self._shared: ParameterSet | None = None  # None: nothing, since the start or a load
        self.is_apart = self._has_changed = False
        self._scaling: tuple[Any, ...] | None = None

    def params(self, target: Any) -> ParameterSet:
        """Return the parameters that ranks share, or the model's where they share none yet."""
        return self._shared or ParameterSet(target)

    def report(self, optimizer: Any, gradients_fit: Callable[[], bool]) -> Report | None:
        """Return what ranks must know of before the loss; None if nothing has changed.

        That the last step failed here they learn after backward, as others may communicate in
        their loss by now.
        ``gradients_fit`` tells whether those that were loaded belong to the model's parameters.
        """
        target, known, changed = optimizer.target, self._shared, False
        if target is None:
            return Report(without_model=1)
        is_rescaled = self._scaling != loss_scaling(optimizer)
        if known is not None and known.is_still_of(target):
            if not is_rescaled:
                return None
        else:
            changed = known is not None or self._has_changed or not gradients_fit()
            known = ParameterSet(target)
        return Report(
            unshared=int(self._shared is None and not changed),
            changed=int(changed),
            uninitialized=int(known.has_uninitialized),
            rescaled=int(is_rescaled),
        )

    def has_initialized(self, target: Any) -> bool:
        """Return whether a parameter got its first value since ranks shared the others."""
        known = self._shared
        return known is None or (known.has_uninitialized and not known.is_still_of(target))

    def raise_without_model(self, target: Any) -> None:
        """Raise on all ranks that this one, or some other, has no model (collective)."""
        with raise_on_all_ranks(self._communicator, OPERATION):
            if target is None:
                raise RuntimeError("the optimizer has no model: call its `setup(model)` first")

    def compare_settings(self, optimizer: Any, total: Report) -> None:
        """Raise RankMismatchError if ranks are set differently (collective)."""
        described = describe_settings(optimizer, not (total.changed or total.unshared))
        settings = {**self._settings, **described}
        self._communicator.handshake("create_multi_node_optimizer", settings.items())
        self.note_scaling(optimizer)

    def synchronize(self, optimizer: Any) -> None:
        """Give rank 0's parameters, persistent values and optimizer state to all (collective).

        What rank 0 has no value for comes from the first rank that has one.
        """
        target = optimizer.target
        self._initialize_missing(target)
        with region("communication"):
            self._communicator.bcast_data(target)
            broadcast_persistents(self._communicator, target)
            broadcast_state(self._communicator, optimizer)
        self.note_scaling(optimizer)
        self.assume(target)

    def _initialize_missing(self, target: Any) -> None:
        """Initialise parameters whose shapes only ranks that had examples know (collective)."""
        named = list(target.namedparams())
        known = {name: param.shape for name, param in named if param.is_initialized}
        lacking = {name for name, _ in named} - known.keys()
        shapes = values_of_first_holders(
            self._communicator, OPERATION, lacking, {*known}, known.__getitem__
        )
        with raise_on_all_ranks(self._communicator, OPERATION):
            for name, param in named:
                if not param.is_initialized and name in shapes:
                    param.initialize(shapes[name])

    def note_scaling(self, optimizer: Any) -> None:
        """Record that all ranks scale their losses alike now."""
        self._scaling = loss_scaling(optimizer)

    def assume(self, target: Any) -> None:
        """Record that all ranks have the same state now."""
        self._shared = ParameterSet(target)
        self.is_apart = self._has_changed = False

    def forget(self, has_changed: bool = False) -> None:
        """Record that this rank may have another state than the others: it has loaded one.

        ``has_changed`` says that its set of parameters had changed when that was saved.
        """
        self._shared, self.is_apart, self._has_changed = None, False, has_changed

    def mark_apart(self) -> None:
        """Record that this rank may not have stepped as others did: the next update shares."""
        self.is_apart = True
