"""How fast communicators must be, as ratios within one run."""

from __future__ import annotations

from typing import NamedTuple

from peers import BUNDLED, GLOO, HANDOFF


class Limit(NamedTuple):
    """A communicator takes at most so many times what a peer takes.

    Attributes:
        name: the communicator.
        reference: the peer of the same run.
        most: the largest ratio of their times.
        ranks: numbers of ranks on one machine that it holds for.
        model: the model that it holds for; None for all.
    """

    name: str
    reference: str
    most: float
    ranks: tuple[int, ...]
    model: str | None = None


RESNET, DIGITS, TINY = "ResNet-50", "digits MLP 64-100-100-10", "1,000 arrays of 100"

LIMITS = (
    Limit("naive", BUNDLED, 1, (2,)),
    *(
        limit
        for name in ("hierarchical", "single_node")
        for limit in (
            Limit(name, HANDOFF, 1.25, (2,), RESNET),
            Limit(name, BUNDLED, 1 / 1.4, (2,), RESNET),
            Limit(name, GLOO, 1 / 4.5, (2,), RESNET),
            Limit(name, BUNDLED, 1 / 1.3, (4,), RESNET),
            Limit(name, BUNDLED, 1 / 1.3, (2,), DIGITS),
            Limit(name, BUNDLED, 1 / 3, (2,), TINY),
        )
    ),
)


def of(model: str, ranks: int) -> list[Limit]:
    """The limits that hold for a model on so many ranks."""
    return [limit for limit in LIMITS if ranks in limit.ranks and limit.model in (None, model)]
