"""The facts that ranks exchange in an update's handshake, and the action that follows."""

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
    """The facts that a rank sends to all others. Nearly always all rows are equal."""

    # This rank has loaded its state, has other parameters, or has failed in a step.
    needs_sharing: bool = False
    # This rank has computed no gradients yet: it can get rank 0's state, then compute.
    can_share_first: bool = False
    can_send: bool = False  # gradients can leave during the backward that is next
    can_plan: bool = False  # the order in which gradients become final is known
    in_flight: bool = False  # there are gradients for the next step (double buffering)
    is_warned: bool = False  # a signal has told this process that it must end soon
    num_calls: int = 0  # updates since the last step, with `accumulate_steps`
    num_added: int = 0  # updates whose gradients are in the sums to exchange
    scaling: int = 0  # checksum of the loss scale, and of how it adapts
    checksum: int = 0  # checksum of a part of the state


_FORMAT = struct.Struct("<6?4I")


class Action(Enum):
    """What all ranks do next."""

    GO_ON = "go on with the update, the flush or backward"
    SHARE = "give rank 0's state to all ranks, then go on: the update counts"
    START_AGAIN = (
        "finish computing, then give rank 0's state to all ranks, and don't step"
    )
    COMPARE = "gather facts from all ranks, then raise what differs or choose an action"
    RESEND = "send no gradients during backward, but all of them after it"


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
    """Return the action of all ranks, the same on each rank, since all have the same rows.

    With ``were_compared``, ranks have gathered facts and found them equal.
    """
    different = set(rows)  # nearly always one row
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
