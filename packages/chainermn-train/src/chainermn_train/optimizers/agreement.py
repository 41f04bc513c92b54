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


class State(IntEnum):
    """What a rank knows of its state: whether the other ranks have the same."""

    SHARED = 0
    ASSUMED = 1  # the user says so; nobody has compared settings
    APART = 2  # its last step failed, so that its state may differ
    NEW = 3  # it has loaded it, or has never shared it, or has other parameters


class Row(NamedTuple):
    """What a rank tells the others. Nearly always all rows are equal."""

    phase: Phase
    state: State
    # Before the loss: its gradients will be those of parameters that it has by then.
    can_count: bool = False
    in_flight: bool = False  # it has gradients that the next step uses
    must_resend: bool = False  # what it has sent is not what its parameters have now
    can_plan: bool = False  # it knows in which order backward gives its gradients
    is_warned: bool = False  # a signal says that it has to end soon
    calls: int = 0  # updates since the last step, with `accumulate_steps`
    terms: int = 0  # updates whose gradients are in those that it hands in
    scaling: int = 0  # a checksum of the loss scale, and of how it adapts
    checksum: int = 0  # of a slice of the state


_FORMAT = struct.Struct("<2B5?4I")


class Action(Enum):
    """What all ranks do next."""

    GO_ON = "what they were about to do"
    SHARE = "give rank 0's state to all; the update counts all the same"
    START_AGAIN = "compute what is left to compute, give rank 0's state to all; no step"
    COMPARE = "gather facts, and raise what differs or settle it by them"
    RESEND = "drop what was sent, and hand in all gradients after backward"


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
    own = rows[0]
    is_steady = own.state == State.SHARED and not own.must_resend
    if is_steady and own.phase != Phase.BEFORE_LOSS and rows.count(own) == len(rows):
        return Action.GO_ON  # nearly always
    phases = {row.phase for row in rows}
    states = {row.state for row in rows}
    is_mixed = Phase.BEFORE_LOSS in phases and len(phases) > 1
    has_apart = State.APART in states or State.NEW in states
    if is_mixed or has_apart or len({row.in_flight for row in rows}) > 1:
        if phases == {Phase.BEFORE_LOSS} and all(row.can_count for row in rows):
            return Action.SHARE
        return Action.START_AGAIN
    alike = {(row.calls, row.scaling, row.checksum) for row in rows}
    if State.ASSUMED in states or len(alike) > 1:
        return Action.COMPARE
    if len(phases) > 1 or any(row.must_resend for row in rows):
        return Action.RESEND
    return Action.GO_ON


def settle_compared(rows: Sequence[Row], have_drifted: bool) -> Action:
    """Return what all ranks do after they have compared facts, and none has raised."""
    state = State.APART if have_drifted else State.SHARED
    return settle(
        [row._replace(state=state, calls=0, scaling=0, checksum=0) for row in rows]
    )
