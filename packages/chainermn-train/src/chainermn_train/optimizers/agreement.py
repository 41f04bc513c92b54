"""What ranks tell each other in an update's one synchronization, and what all of them do then."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from chainermn_comm import RankMismatchError, Reducer

from ..collective_errors import mismatch_hint
from ..profiling import region

OPERATION = "update"


class Row(NamedTuple):
    """What a rank tells the others. Nearly always all rows are equal."""

    # It has loaded its state, or has other parameters, or its last step failed.
    needs_sharing: bool = False
    # It has computed no gradients yet: this update can be one of the state that is shared.
    can_share_first: bool = False
    can_send: bool = False  # it is about to call backward, and could send meanwhile
    can_plan: bool = False  # it knows in which order backward gives its gradients
    in_flight: bool = False  # it has gradients that the next step uses
    is_warned: bool = False  # a signal says that it has to end soon
    num_calls: int = 0  # updates since the last step, with `accumulate_steps`
    num_added: int = 0  # updates whose gradients are in those that the exchange takes
    scaling: int = 0  # a checksum of the loss scale, and of how it adapts
    checksum: int = 0  # of a slice of the state


_FORMAT = struct.Struct("<6?4I")


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


def settle(rows: Sequence[Row], were_compared: bool = False) -> Action:
    """Return what all ranks do, by the rows of all: each rank finds the same.

    If facts ``were_compared``, what they stand for is equal on all ranks.
    """
    different = set(rows)  # nearly always one
    needs_sharing = any([row.needs_sharing for row in different])
    if needs_sharing or len({row.in_flight for row in different}) > 1:
        if all([row.can_share_first for row in different]):
            return Action.SHARE
        return Action.START_AGAIN
    compared = {(row.num_calls, row.scaling, row.checksum) for row in different}
    if len(compared) > 1 and not were_compared:
        return Action.COMPARE
    if len({row.can_send for row in different}) > 1:
        return Action.RESEND
    return Action.GO_ON
