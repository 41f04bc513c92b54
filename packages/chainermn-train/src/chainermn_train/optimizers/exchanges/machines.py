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
        members: dict[int, list[int]] = {}
        for other, machine in enumerate(by_rank):
            members.setdefault(machine, []).append(other)
        self.here = members[by_rank[rank]]
        place = self.here.index(rank)
        self.partners = []
        self.served = []
        for _, there in sorted(members.items()):
            # The ranks of a smaller machine are partners of several ranks each.
            self.partners.append(there[place % len(there)])
            self.served += there[place :: len(self.here)]
        self.are_several = len(members) > 1
