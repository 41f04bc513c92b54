"""The state of an optimizer that all ranks have alike: to check it, compare it and share it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from chainermn_comm import CommunicatorBase, RankMismatchError
from chainermn_comm.parts import part_entries

from ..collective_errors import allgather_checked, mismatch_hint, raise_together
from ..profiling import region
from ..slots import (
    HYPERPARAMETERS,
    LOSS_SCALING,
    Facts,
    broadcast_slots,
    compared_slots,
    entries_of,
    facts_of,
    named_parameters,
    numbers_of,
    raise_if_different,
    scaling_settings,
    slots_of,
)
from .agreement import OPERATION, Row
from .drift import DriftDetector
from .parameter_set import ParameterSet

_CALLS = "updates of a step so far"
_UNKNOWN = (
    "parameters that setup() hasn't seen, such as those of a link that was replaced (call "
    "setup(model) on all ranks after a change of the model)"
)
OUT_OF_STEP = (
    "the last update has failed on some rank, and ranks that hold other parts of the model "
    "may have made it, or wait for messages of it: end the job, or load a checkpoint on all "
    "ranks; if all ranks of the model have skipped that update, call synchronize() on all"
)
_REMEDY = (
    "call synchronize() on all ranks to give them rank 0's state, and see "
    "create_multi_node_optimizer's on_drift"
)


class SharedState:
    """Knows what ranks have alike of one optimizer, and makes it so.

    Attributes:
        params: the parameters, once all ranks have the same state; None as long as the
            state isn't shared.
        drift: compares parts of the state in turn.
        has_failed: whether this rank has failed in a step, so that its parameters may
            not be those of the other ranks; or in any update of a model in parts.
        has_equal_settings: whether ranks have agreed on :meth:`settings`.
    """

    def __init__(
        self, communicator: CommunicatorBase, arguments: dict[str, Any]
    ) -> None:
        """Begin with nothing shared; ``arguments`` of the optimizer must be equal on all ranks."""
        self._communicator = communicator
        self._arguments = {name: str(value) for name, value in arguments.items()}
        self.drift = DriftDetector()
        self.has_equal_settings = False
        self.forget()

    def forget(self) -> None:
        """Record that this rank's state may differ from the other ranks'."""
        self.params: ParameterSet | None = None
        self.has_failed = False

    def assume(self, target: Any) -> None:
        """Record that all ranks have the same state now."""
        self.params = ParameterSet(target)
        self.has_failed = False
        self.drift.restart()

    def needs_sharing(self) -> bool:
        """Return whether ranks may have different states; a loss may initialise parameters."""
        return self.has_failed or self.params is None or self.params.has_new_values()

    def settings(self, optimizer: Any) -> list[tuple[str, str]]:
        """Return names and texts of the settings, until ranks have found them equal once."""
        if self.has_equal_settings:
            return []
        facts = {
            **self._arguments,
            HYPERPARAMETERS: numbers_of(getattr(optimizer, "hyperparam", None)),
            LOSS_SCALING: scaling_settings(optimizer),
        }
        return entries_of(facts)

    def checksum(self, optimizer: Any, has_changed: bool) -> int:
        """Return the checksum of the part that ranks compare next; 0 if they compare nothing.

        If the user ``has_changed`` parameters here, no other rank returns the same
        number, so that ranks compare everything.
        """
        if self._arguments["on_drift"] == "ignore" or self.params is None:
            return 0
        if has_changed:
            return 1 + self._communicator.rank
        return self.drift.checksum(self.params.params, getattr(optimizer, "t", 0))

    def share(self, optimizer: Any) -> None:
        """Give rank 0's state to all (collective).

        Hyperparameters belong to the state after ranks have found them equal once.
        """
        communicator = self._communicator
        self.params = None  # also where it fails midway

        with region("communication"):
            rows = allgather_checked(
                communicator, OPERATION, lambda: facts_of(slots_of(optimizer))
            )
            named = named_parameters(optimizer.target)
            unknown = [
                (_UNKNOWN, name) for name, param in named if param.update_rule is None
            ]
            communicator.handshake(OPERATION, (*part_entries(named), *unknown))
            if not self.has_equal_settings:
                del rows[0][HYPERPARAMETERS]
            with mismatch_hint("a multi-node optimizer"):
                broadcast_slots(communicator, optimizer, rows)
        self.assume(optimizer.target)

    def compare(self, optimizer: Any, rows: Sequence[Row]) -> bool:
        """Compare all facts, and raise on all ranks the first one that differs (collective).

        If drift isn't an error, rank 0 warns of a difference instead. Return whether there
        is a difference, so that all ranks must get rank 0's state.
        """
        communicator = self._communicator
        rank = communicator.rank

        def own() -> Facts:
            facts = facts_of(compared_slots(optimizer), with_checksums=True)
            return {_CALLS: rows[rank].num_calls, **facts}

        facts = allgather_checked(communicator, OPERATION, own)
        try:
            raise_if_different(OPERATION, rank, facts)
        except RankMismatchError as error:
            if len({(row.num_calls, row.scaling) for row in rows}) > 1:
                raise
            error.args = (
                f"{error} (perhaps since t = {self.drift.equal_at}); {_REMEDY}",
            )
            if self._arguments["on_drift"] == "raise":
                raise
            # The warning may be an error, on rank 0 alone.
            with raise_together(communicator.handshake, OPERATION):
                if rank == 0:
                    warnings.warn(
                        f"{error}; all ranks get rank 0's", RuntimeWarning, stacklevel=2
                    )
            return True
        # Only the bits of NaNs differ, or ranks compare different parts.
        self.drift.restart()
        return False
