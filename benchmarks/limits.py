"""How fast communicators must be, as ratios within one run, and how much they may move."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from peers import BUNDLED, GLOO, HANDOFF, HANDSHAKE

AT_MOST, AT_LEAST = "at most", "at least"


class Limit(NamedTuple):
    """A case takes at most so many times what another takes, or is so many times as fast.

    Attributes:
        name: the case.
        reference: the other of the same run.
        sense: `AT_MOST`, of the ratio of its time to the other's, or `AT_LEAST`, of the inverse.
        bound: of that ratio.
        ranks: numbers of ranks on one machine that it holds for.
        model: the model that it holds for; None for all.
    """

    name: str
    reference: str
    sense: str
    bound: float
    ranks: tuple[int, ...]
    model: str | None = None

    def judge(self, ms: dict[str, np.ndarray]) -> dict[str, Any]:
        """See :func:`judge`; ``ms`` are the times of each round by case."""
        if self.sense == AT_MOST:
            what, pair = f"{self.name}: time over that of", (self.name, self.reference)
        else:
            what, pair = f"{self.name}: times as fast as", (self.reference, self.name)
        ratios = ms[pair[0]] / ms[pair[1]] if self.reference in ms else None
        return judge(f"{what} {self.reference}", self.sense, self.bound, ratios)


RESNET, DIGITS, TINY = "ResNet-50", "digits MLP 64-100-100-10", "1,000 arrays of 100"
# These move gradients within one machine by the same means.
IN_A_NODE = ("hierarchical", "single_node")

LIMITS = (
    Limit("naive", BUNDLED, AT_MOST, 1, (2,)),
    *(
        limit
        for name in IN_A_NODE
        for limit in (
            Limit(name, HANDOFF, AT_MOST, 1.25, (2,), RESNET),
            Limit(name, BUNDLED, AT_LEAST, 1.4, (2,), RESNET),
            Limit(name, GLOO, AT_LEAST, 4.5, (2,), RESNET),
            Limit(name, BUNDLED, AT_LEAST, 1.3, (4,), RESNET),
            Limit(name, BUNDLED, AT_LEAST, 1.3, (2,), DIGITS),
            Limit(name, BUNDLED, AT_LEAST, 3, (2,), TINY),
        )
    ),
    Limit(HANDSHAKE, IN_A_NODE[0], AT_MOST, 0.03, (2,), RESNET),
    Limit(HANDSHAKE, IN_A_NODE[0], AT_MOST, 0.1, (2,), DIGITS),
)

# The bytes that a rank moves are at most so many times those of the gradients, whatever
# the number of ranks n: through shared memory 2 or 3 for two ranks and 3 + 1/n for
# more, in place 4 - 4/n. But of so little that each rank sums all itself, n + 1 times.
MOVED = 4


def of(model: str, ranks: int) -> list[Limit]:
    """The limits that hold for a model on so many ranks."""
    return [
        limit
        for limit in LIMITS
        if ranks in limit.ranks and limit.model in (None, model)
    ]


def judge_moved(name: str, times: float) -> dict[str, Any]:
    """What is said of a communicator's counted bytes, so many times the gradients'."""
    what = f"{name}: bytes moved over the gradients' (counted)"
    # Ranks also talk a little.
    return judge(what, AT_MOST, MOVED, np.array([times]), slack=1.01)


def judge(
    what: str, sense: str, bound: float, ratios: np.ndarray | None, slack: float = 1
) -> dict[str, Any]:
    """A row of the table of limits: ``ok`` and ``ratio`` (quartiles) are None if not measured."""
    row: dict[str, Any] = {
        "limit": what,
        "must": f"{sense} {bound:g}",
        "ratio": None,
        "ok": None,
    }
    if ratios is not None:
        median = float(np.median(ratios))
        row["ratio"] = quartiles(ratios)
        row["ok"] = median >= bound if sense == AT_LEAST else median <= bound * slack
    return row


def quartiles(values: np.ndarray) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(float(q), 4) for q in np.percentile(values, (25, 50, 75))]
