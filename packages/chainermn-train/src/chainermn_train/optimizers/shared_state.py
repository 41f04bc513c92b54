"""What is the same on all ranks: whether it is, what differs, and rank 0's for all."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from chainermn_comm import CommunicatorBase, RankMismatchError

from ..collective_errors import allgather_checked, raise_together
from ..profiling import region
from ..slots import (
    HYPERPARAMETERS,
    LOSS_SCALING,
    Facts,
    broadcast_slots,
    entries_of,
    facts_of,
    raise_if_different,
    slots_of,
    without_progress,
)
from ..wrappers import UnpicklableMixin
from .agreement import OPERATION, Row, State
from .drift import DriftDetector
from .parameter_set import ParameterSet

# Facts beside those of slots.
_KIND = "optimizer"
_CALLS = "updates of a step so far"
_COMPARED = "comparison of settings"
_REMEDY = (
    "call synchronize() on all ranks to give them rank 0's state, and see "
    "create_multi_node_optimizer's on_drift"
)


class SharedState(UnpicklableMixin):
    """Knows what ranks have alike of one optimizer, and makes it so.

    Attributes:
        params: parameters that all ranks have in the same state; None if this rank
            knows of none.
        is_apart: whether this rank may not have stepped as the others did.
    """

    def __init__(
        self, communicator: CommunicatorBase, arguments: dict[str, Any]
    ) -> None:
        """Begin with nothing shared; ``arguments`` of the optimizer must be equal on all ranks."""
        self._communicator = communicator
        self._arguments = arguments
        self._on_drift = arguments["on_drift"]
        # Whether settings were found to be equal; a single rank's always are.
        self._were_compared = communicator.size == 1
        self._drift = DriftDetector()
        self.params: ParameterSet | None = None
        self.is_apart = False

    def find(self, target: Any) -> State:
        """Return what this rank knows before its loss."""
        if self.params is None or not self.params.is_still_of(target):
            return State.NEW
        return self.find_after_loss()

    def find_after_loss(self) -> State:
        """Return what this rank knows then: the loss may have given parameters values."""
        if self.params is None or self.params.has_new_values():
            return State.NEW
        if self.is_apart:
            return State.APART
        return State.SHARED if self._were_compared else State.ASSUMED

    def forget(self) -> None:
        """Record that this rank may have another state than the others."""
        self.params = None
        self.is_apart = False

    def assume(self, target: Any) -> None:
        """Record that all ranks have the same state now."""
        self.params = ParameterSet(target)
        self.is_apart = False
        self._drift.restart()

    def checksum(self, optimizer: Any) -> int:
        """Return that of the slice that ranks compare next; 0 where they compare nothing."""
        is_alone = self._communicator.size == 1
        if is_alone or self._on_drift == "ignore" or self.params is None:
            return 0
        return self._drift.checksum(self.params.params, getattr(optimizer, "t", 0))

    def advance(self) -> None:
        """Go on to the next slice, as ranks have the same."""
        self._drift.advance()

    def share(self, optimizer: Any, *, compares: bool) -> None:
        """Give rank 0's state to all (collective).

        Hyperparameters are among it once they were found to be equal. Where they never
        were, they and all other settings must be equal if this ``compares``.
        """
        communicator = self._communicator
        self.params = None  # also where it fails midway
        with region("communication"):
            if communicator.size == 1:
                communicator.bcast_data(optimizer.target)
            else:
                rows = self._gather(optimizer)
                if compares and not all(row[_COMPARED] for row in rows):
                    self._raise_if_set_differently(
                        [without_progress(row) for row in rows]
                    )
                    self._were_compared = True
                if not self._were_compared:
                    del rows[0][HYPERPARAMETERS]
                broadcast_slots(communicator, optimizer, rows)
        self.assume(optimizer.target)

    def compare(self, optimizer: Any, rows: Sequence[Row], num_calls: int) -> bool:
        """Raise on all ranks what differs (collective).

        Return whether states differ that are to be repaired: rank 0 has warned then.
        """
        rank = self._communicator.rank
        have_drifted = len({row.checksum for row in rows}) > 1
        facts = self._gather(optimizer, num_calls, have_drifted)
        self._raise_if_set_differently(facts)
        self._were_compared = True
        if not have_drifted:
            return False
        for row in facts:
            del row[_COMPARED]
        try:
            raise_if_different(OPERATION, rank, [entries_of(row) for row in facts])
        except RankMismatchError as error:
            since = self._drift.equal_at
            error.args = (f"{error} (perhaps since t = {since}); {_REMEDY}",)
            if self._on_drift == "raise":
                raise
            # If warnings are errors.
            with raise_together(self._communicator.handshake, OPERATION):
                if rank == 0:
                    text = f"{error}; all ranks get rank 0's"
                    warnings.warn(text, RuntimeWarning, stacklevel=6)
            return True
        # Only the bits of NaNs differ, or ranks are at different slices.
        self._drift.restart()
        return False

    def _gather(
        self, optimizer: Any, num_calls: int = 0, have_drifted: bool = False
    ) -> list[Facts]:
        """Return the facts of all ranks (collective); after drift, those that are compared."""

        def own() -> Facts:
            slots = slots_of(optimizer)
            if have_drifted:
                slots = [slot for slot in slots if slot.is_compared]
            return {
                **{name: str(value) for name, value in self._arguments.items()},
                _KIND: type(optimizer).__name__,
                _CALLS: num_calls,
                _COMPARED: self._were_compared,
                **facts_of(slots, with_checksums=have_drifted),
            }

        return allgather_checked(self._communicator, OPERATION, own)

    def _raise_if_set_differently(self, rows: Sequence[Facts]) -> None:
        """Raise RankMismatchError if the optimizer was made or set differently."""
        names = [*self._arguments, _KIND, LOSS_SCALING, _CALLS]
        if not all(row[_COMPARED] for row in rows):
            names.append(HYPERPARAMETERS)  # which extensions may change later
        entries = [entries_of({name: row[name] for name in names}) for row in rows]
        operation = "create_multi_node_optimizer"
        raise_if_different(operation, self._communicator.rank, entries)
