"""What ranks tell each other in an update's one synchronization."""

from __future__ import annotations

import struct
from functools import cache, lru_cache
from typing import NamedTuple

from chainermn_comm import MeanInProgress, RankMismatchError

from ..collective_errors import add_mismatch_hint
from ..profiling import region

OPERATION = "update"
_FORM = struct.Struct("<11Bq")


class Flags(NamedTuple):
    """What holds for a rank, 0 or 1 each; of all ranks, how many."""

    before_loss: int = 0  # it has seen a reason to agree before it computes its loss
    changed: int = 0  # the set of its initialised parameters, or one that is not initialised
    uninitialized: int = 0  # it has parameters that are not
    without_loss: int = 0  # it has no loss function to call
    rescaled: int = 0  # its loss scale has changed
    without_model: int = 0
    apart: int = 0  # its last step failed, so that its state may differ
    failed: int = 0  # the exchange under way
    planned: int = 0  # it sends gradients before it agrees
    redo: int = 0  # what it has sent is not what its parameters have now
    can_plan: int = 0  # it knows what it could have sent before it agreed
    num_accumulated: int = 0  # updates whose gradients are in those handed in


#: Of a rank that has nothing to tell.
STEADY = Flags()


@cache
def steady(num_accumulated: int) -> Flags:
    """Return the flags of a rank that has nothing to tell but how many updates it hands in."""
    return Flags(num_accumulated=num_accumulated)


def agree(mean: MeanInProgress, call: str, flags: Flags) -> Flags:
    """Return each flag's sum over ranks (collective).

    RankMismatchError on all if ``call``, what they do and after how many updates, differs, or the
    gradients that were handed in.
    """
    own = _packed(flags)
    with region("waiting"):
        try:
            rows = mean.agree((("call", call),), own)
        except RankMismatchError as error:
            add_mismatch_hint(error, "a multi-node optimizer")
            raise
    return _total(own, len(rows)) if rows.count(own) == len(rows) else _sum(rows)


# Nearly every update has the same flags on all ranks as the one before.
@lru_cache(maxsize=8)
def _packed(flags: Flags) -> bytes:
    return _FORM.pack(*flags)


@lru_cache(maxsize=8)
def _total(row: bytes, size: int) -> Flags:
    return _sum([row] * size)


def _sum(rows: list[bytes]) -> Flags:
    return Flags._make(map(sum, zip(*map(_FORM.unpack, rows), strict=True)))
