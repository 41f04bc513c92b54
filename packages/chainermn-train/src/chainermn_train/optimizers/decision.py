"""What ranks report in the one synchronization of an update, and what all of them do then."""

from __future__ import annotations

import struct
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from chainermn_comm import RankMismatchError, Reducer

from ..collective_errors import mismatch_hint
from ..profiling import region

OPERATION = "update"


class Report(NamedTuple):
    """What holds for a rank, 0 or 1 each; of all ranks, the sums."""

    # It reports before it computes its loss, as it has something to report.
    before_loss: int = 0
    # It could send gradients during backward, which it hasn't begun.
    before_backward: int = 0
    # It has never had the same state as the others, or has loaded another.
    unshared: int = 0
    # Its set of initialised parameters is not the one that ranks share.
    changed: int = 0
    apart: int = 0  # its last step failed, so that its state may differ
    # It has no loss function to call, or parameters without values.
    cannot_count: int = 0
    rescaled: int = 0  # its loss scale has changed
    in_flight: int = 0  # it has gradients that the next step uses
    resend: int = 0  # what it has sent is not what its parameters have now
    can_plan: int = 0  # it knows in which order backward gives its gradients
    warned: int = 0  # a signal says that it has to end soon
    num_accumulated: int = 0  # updates whose gradients are in those handed in
    drifted: int = 0  # of all ranks only: they don't have the same parameters or state
    uneven: int = 0  # likewise: they have made different numbers of updates of a group


class Decision(Enum):
    """What all ranks do next."""

    COMPARE_SETTINGS = (
        "compare the optimizers' settings, raise if they differ, decide again"
    )
    COMPARE_STATE = (
        "compare what a checksum was made of, mend or raise it, decide again"
    )
    CONTINUE = "compute the loss, and report again"
    SYNCHRONIZE = "give rank 0's state to all, then compute the loss, and report again"
    START_AGAIN = (
        "compute what is left to compute, then give rank 0's state to all; nobody steps"
    )
    SEND = "send gradients during backward, and report again"
    RESEND = "drop what was sent or handed in, and hand in all gradients after backward"
    ADD = "add the gradients to the group's"
    STEP = "exchange the gradients, and step"


def keeps_gradients(total: Report, size: int) -> bool:
    """Return whether gradients in flight or added up stay valid when rank 0's state goes to all.

    They do where all ranks begin or resume; else they may belong to other parameters.
    """
    is_even = total.in_flight in (0, size) and not total.uneven
    return is_even and total.unshared == size and not total.apart


@lru_cache(maxsize=8)  # reports are nearly always the same from one update to the next
def decide(total: Report, size: int, is_last: bool = True) -> Decision:
    """Return what all ranks do; ``is_last`` says whether the gradients complete a group."""
    are_alike = not (total.unshared or total.changed or total.apart)
    if (total.rescaled and not total.apart) or (total.uneven and are_alike):
        return Decision.COMPARE_SETTINGS
    counts = total.in_flight, total.before_loss
    is_together = all(count in (0, size) for count in counts)
    if not (are_alike and is_together):
        # The update still counts where its loss comes later, on parameters that have
        # values.
        can_count = total.before_loss == size and not total.cannot_count
        return Decision.SYNCHRONIZE if can_count else Decision.START_AGAIN
    if total.drifted:
        return Decision.COMPARE_STATE
    if total.before_loss:
        return Decision.CONTINUE
    if total.before_backward == size:
        return Decision.SEND
    if total.before_backward or total.resend:
        return Decision.RESEND
    return Decision.STEP if is_last else Decision.ADD


_ROW = struct.Struct("<11BqII")  # a report, a digest, and updates of the present group


def agree(
    reducer: Reducer,
    signature: tuple[tuple[str, str], ...],
    own: Report,
    digest: int = 0,
    num_calls: int = 0,
) -> Report:
    """Return the sums of all ranks' reports, by the reducer that has the gradients (collective).

    ``drifted`` is set where ``digest`` differs between ranks, and ``uneven`` where
    ``num_calls``, the updates of the present group, do; RankMismatchError if the
    ``signature`` or gradients differ.
    """
    row = _ROW.pack(*own[:-2], digest, num_calls)
    with region("waiting"):
        try:
            rows = reducer.agree(signature, row)
        except RankMismatchError:
            with mismatch_hint("a multi-node optimizer"):
                raise
    if rows.count(row) == len(rows):  # nearly always
        return _total_of_equal(own, len(rows))
    *counts, digests, calls = zip(*map(_ROW.unpack, rows), strict=True)
    return Report._make(
        [*map(sum, counts), *[len(set(it)) > 1 for it in (digests, calls)]]
    )


@lru_cache(maxsize=8)
def _total_of_equal(report: Report, size: int) -> Report:
    return Report._make([count * size for count in report])
