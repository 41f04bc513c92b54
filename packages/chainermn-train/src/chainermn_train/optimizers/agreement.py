"""What ranks tell each other in an update's one synchronization, and what all of them do then."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import NamedTuple

from chainermn_comm import RankMismatchError, Reducer

from ..collective_errors import mismatch_hint
from ..profiling import region

OPERATION = "update"


class Phase(IntEnum):
    """How far a rank's update is when the rank meets the others."""

    BEFORE_LOSS = 0  # it knows before its loss that ranks must settle something
    BEFORE_BACKWARD = 1  # it could send gradients during backward
    READY = 2  # its gradients are there


class Row(NamedTuple):
    """What a rank tells the others. Nearly always all rows are equal."""

    phase: Phase
    # It has loaded its state, or has other parameters, or its last step failed.
    is_new: bool = False
    # Before the loss: its gradients will be those of parameters that it has by then.
    can_count: bool = False
    in_flight: bool = False  # it has gradients that the next step uses
    can_plan: bool = False  # it knows in which order backward gives its gradients
    is_warned: bool = False  # a signal says that it has to end soon
    calls: int = 0  # updates since the last step, with `accumulate_steps`
    terms: int = 0  # updates whose gradients are in those that it hands in
    scaling: int = 0  # a checksum of the loss scale, and of how it adapts
    checksum: int = 0  # of a slice of the state


_FORMAT = struct.Struct("<B5?4I")


class Action(Enum):
    """What all ranks do next."""

    GO_ON = "what they were about to do"
    SHARE = "give rank 0's state to all; the update counts all the same"
    START_AGAIN = "compute what is left to compute, give rank 0's state to all; no step"
    COMPARE = "gather facts, and raise what differs or settle it by them"
    RESEND = "send nothing during backward, and exchange all gradients after it"


def exchange_rows(
    reducer: Reducer, signature: tuple[tuple[str, str], ...], own: Row
) -> list[Row]:
    """Return all ranks' rows, by the reducer that has the gradients (collective).

    RankMismatchError if the ``signature`` or gradients differ.
    """
    packed = _FORMAT.pack(*own)
    with region("waiting"):
        try:
            rows = reducer.agree(signature, packed)
        except RankMismatchError:
            with mismatch_hint("a multi-node optimizer"):
                raise
    if rows.count(packed) == len(rows):
        return [own] * len(rows)
    return [Row(*_FORMAT.unpack(row)) for row in rows]


def settle(rows: Sequence[Row]) -> Action:
    """Return what all ranks do, by the rows of all: each rank finds the same."""
    different = set(rows)  # nearly always one
    phases = {row.phase for row in different}
    is_mixed = Phase.BEFORE_LOSS in phases and len(phases) > 1
    has_new = any([row.is_new for row in different])
    if is_mixed or has_new or len({row.in_flight for row in different}) > 1:
        if all([row.can_count for row in different]):
            return Action.SHARE
        return Action.START_AGAIN
    if len({(row.calls, row.scaling, row.checksum) for row in different}) > 1:
        return Action.COMPARE
    if len(phases) > 1:
        return Action.RESEND
    return Action.GO_ON


def settle_compared(rows: Sequence[Row], have_drifted: bool) -> Action:
    """Return what all ranks do after they have compared facts, and none has raised."""
    return settle(
        [
            row._replace(is_new=have_drifted, calls=0, scaling=0, checksum=0)
            for row in rows
        ]
    )
