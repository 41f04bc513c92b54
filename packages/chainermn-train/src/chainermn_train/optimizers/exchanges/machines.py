"""Which ranks exchange with each other over machines, if each rank steps parts of parameters."""

from __future__ import annotations

from collections.abc import Sequence


class Machines:
    """The partners of one rank: for the parts of each rank, one of each machine.

    The partner of a part's rank adds up the gradients of the partner's machine for this
    part, and gets the values after the step. On its own machine a rank is its partner.

    Attributes:
        here: the ranks of this rank's machine.
        partners: this rank's partner on each machine, in the order of machines.
        served: the ranks whose partner is this rank.
        are_several: whether there is more than one machine.
    """

    def __init__(self, by_rank: Sequence[int], rank: int) -> None:
        """Take the machine of each rank, and this rank."""
        self._by_rank = list(by_rank)
        own = by_rank[rank]
        ranks = range(len(by_rank))
        self.here = [other for other in ranks if by_rank[other] == own]
        self.partners = [self._partner(rank, it) for it in sorted(set(by_rank))]
        self.are_several = len(self.partners) > 1
        self.served = [it for it in ranks if self._partner(it, own) == rank]

    def _partner(self, rank: int, machine: int) -> int:
        by_rank = self._by_rank
        there = [other for other, it in enumerate(by_rank) if it == machine]
        place = by_rank[:rank].count(by_rank[rank])  # of the rank on its own machine
        return there[place % len(there)]
