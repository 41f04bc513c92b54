"""What ranks report in the one synchronization of an update, and what all of them do then."""

from __future__ import annotations

import struct
from enum import Enum
from functools import cache, lru_cache
from typing import NamedTuple

from chainermn_comm import MeanInProgress, RankMismatchError

from ..collective_errors import add_mismatch_hint
from ..profiling import region

OPERATION = "update"


class Report(NamedTuple):
    """What holds for a rank, 0 or 1 each; of all ranks, the sums."""

    before_loss: int = 0  # it reports before it computes its loss, as it has something to report
    before_backward: int = 0  # it could send gradients during backward, which it hasn't begun
    unshared: int = 0  # it has never had the same state as the others, or has loaded another
    changed: int = 0  # its set of initialised parameters is not the one that ranks share
    apart: int = 0  # its last step failed, so that its state may differ
    cannot_count: int = 0  # it has no loss function to call, or parameters without values
    rescaled: int = 0  # its loss scale has changed
    in_flight: int = 0  # it has gradients that the next step uses
    resend: int = 0  # what it has sent is not what its parameters have now
    can_plan: int = 0  # it knows in which order backward gives its gradients
    num_accumulated: int = 0  # updates whose gradients are in those handed in
    drifted: int = 0  # of all ranks only: they don't have the same parameters or state

    @property
    def is_news(self) -> bool:
        """Whether it is known that this rank may have another state."""
        return bool(self.unshared or self.changed or self.apart)


class Decision(Enum):
    """What all ranks do next."""

    COMPARE_SETTINGS = "compare the optimizers' settings, raise if they differ, decide again"
    COMPARE_STATE = (
        "compare what a checksum was made of, repair or raise what differs, decide again"
    )
    CONTINUE = "compute the loss, and report again"
    SYNCHRONIZE = "give rank 0's state to all, then compute the loss, and report again"
    START_AGAIN = "compute what is left to compute, then give rank 0's state to all; nobody steps"
    SEND = "send gradients during backward, and report again"
    RESEND = "drop what was sent or handed in, and hand in all gradients after backward"
    ADD = "add the gradients to the group's"
    STEP = "exchange the gradients, and step"


def keeps_gradients(total: Report, size: int) -> bool:
    """Return whether gradients in flight or added up stay valid when rank 0's state goes to all.

    They do where all ranks begin or resume; else they may belong to other parameters.
    """
    return total.unshared == size and total.in_flight in (0, size) and not total.apart


def decide(total: Report, size: int, is_last: bool = True) -> Decision:
    """Return what all ranks do.

    Args:
        total: the sums of all ranks' reports.
        size: number of ranks.
        is_last: whether the gradients complete a group.
    """
    if total.rescaled and not total.apart:
        return Decision.COMPARE_SETTINGS
    are_alike = not (total.unshared or total.changed or total.apart)
    is_together = total.in_flight in (0, size) and total.before_loss in (0, size)
    if not (are_alike and is_together):
        # The update still counts where its loss comes later, on parameters that have values.
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


# Reports are nearly always the same from one update to the next.
_FORM = struct.Struct("<10Bq")
_DIGEST = struct.Struct("<I")


@cache
def steady(num_accumulated: int, in_flight: int) -> Report:
    """Return the report of a rank that has nothing to say but what it hands in."""
    return Report(num_accumulated=num_accumulated, in_flight=in_flight)


def agree(mean: MeanInProgress, call: str, own: Report, digest: int) -> Report:
    """Return the sums of all ranks' reports (collective).

    Args:
        mean: by which ranks synchronize, with the gradients that were handed in.
        call: what ranks do, and after how many updates.
        own: this rank's report.
        digest: of what must be equal on all ranks; ``drifted`` is set where it is not.

    Raises:
        RankMismatchError: on all ranks, if calls or gradients differ.
    """
    row = _FORM.pack(*own[:-1]) + _DIGEST.pack(digest)
    with region("waiting"):
        try:
            rows = mean.agree((("call", call),), row)
        except RankMismatchError as error:
            add_mismatch_hint(error, "a multi-node optimizer")
            raise
    drifted = len({each[_FORM.size :] for each in rows}) > 1
    return _total(tuple([each[: _FORM.size] for each in rows]), drifted)


@lru_cache(maxsize=8)
def _total(rows: tuple[bytes, ...], drifted: bool) -> Report:
    reports = map(_FORM.unpack, rows)
    return Report._make([*map(sum, zip(*reports, strict=True)), int(drifted)])
