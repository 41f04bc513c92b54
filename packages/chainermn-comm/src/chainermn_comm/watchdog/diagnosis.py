"""Finds out which rank keeps the others waiting, from what all of them do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .processes import GONE, RUNNING, STOPPED
from .status_region import COLLECTIVE, FINALIZE, MESSAGE, WORLD, Call


@dataclass(frozen=True)
class Rank:
    """What a rank does."""

    world: int  # its number in MPI.COMM_WORLD
    host: str  # name of its machine
    pid: int
    state: str  # RUNNING, STOPPED or GONE
    # What it does, or did last, on each of its communicators.
    calls: tuple[Call, ...] = ()
    # Of its threads; empty where they weren't asked for or didn't come.
    stacks: str = ""
    updates: int = 0  # calls of it until now, of any multi-node optimizer
    examples: int = 0  # in them, as far as it is known

    @property
    def waits(self) -> list[Call]:
        return [call for call in self.calls if call.waits]

    @property
    def has_finished(self) -> bool:
        """Whether its program is over; its process may wait in MPI_Finalize, or be gone."""
        return any(call.operation == FINALIZE for call in self.waits)

    @property
    def is_outside(self) -> bool:
        """Whether it runs outside of any call."""
        return self.state == RUNNING and not self.waits

    @property
    def is_lost(self) -> bool:
        """Whether it is stopped, or gone before its program was over."""
        return self.state == STOPPED or (self.state == GONE and not self.has_finished)


def rank_from_reply(said: dict[str, Any]) -> Rank:
    """Return a rank of another machine, as its monitor has described it."""
    known = (
        {**call, "communicator": tuple(call["communicator"])} for call in said["calls"]
    )
    return Rank(**{**said, "calls": tuple(Call(**call) for call in known)})


Waits = Sequence[tuple[Rank, Call]]  # ranks, each with a call that it is in


class WaitGraph:
    """The ranks, which of them wait for which, and the hosts whose monitor didn't reply."""

    def __init__(self, ranks: Iterable[Rank], unreachable: Iterable[str] = ()) -> None:
        self.ranks = {rank.world: rank for rank in ranks}
        self.unreachable = tuple(unreachable)
        self._members: dict[tuple[int, int], dict[int, tuple[Rank, Call]]] = {}
        for rank in self.ranks.values():
            for call in rank.calls:
                self._members.setdefault(call.communicator, {})[call.rank] = rank, call

    def world_rank(self, call: Call, rank: int) -> int | None:
        """Return the world's number of a rank of the call's communicator; None if unknown."""
        found = self._members.get(call.communicator, {}).get(rank)
        return found[0].world if found else None

    def num_unknown(self, call: Call) -> int:
        """Return how many ranks of the call's communicator nothing is known of."""
        if call.communicator == WORLD:
            return max(0, call.size - len(self.ranks))
        return call.size - len(self._members[call.communicator])

    def waits_for(self, rank: Rank, call: Call) -> list[Rank]:
        """Return those that must do something before the call of this rank can end."""
        if call.communicator == WORLD:
            return [
                other
                for other in self.ranks.values()
                if other.is_lost or other.is_outside
            ]
        members = self._members[call.communicator]
        if call.state == MESSAGE:
            peer = members.get(call.peer)
            return [peer[0]] if peer else []
        return [
            other
            for other, theirs in members.values()
            if other is not rank and (theirs.sequence < call.sequence or other.is_lost)
        ]

    def root_causes(self, stalled: Waits) -> list[Rank]:
        """Return the ranks for which, in the end, these calls wait; the likeliest first.

        Of the ranks that are waited for, those that themselves wait for none. Where all
        wait for one another, all of them; none where they wait for ranks that nothing
        is known of.
        """
        reached: dict[int, Rank] = {
            rank.world: rank for rank, _ in stalled if rank.is_lost
        }
        causes = dict(reached)
        todo = list(stalled)
        waits_for_unknown = False
        while todo:
            rank, call = todo.pop()
            found = self.waits_for(rank, call)
            # A message's report names the other rank.
            if not found and call.state == COLLECTIVE:
                waits_for_unknown |= self.num_unknown(call) > 0
            for other in found:
                if other.world in reached:
                    continue
                reached[other.world] = other
                if other.is_lost or not other.waits or other.has_finished:
                    causes[other.world] = other
                else:
                    todo += [(other, theirs) for theirs in other.waits]
        blamed = causes or ({} if waits_for_unknown else reached)
        return sorted(blamed.values(), key=_likelihood)


def _likelihood(rank: Rank) -> tuple[int, int, int]:
    """Return a key that sorts first: gone, stopped, in no call, behind the others' calls."""
    waits = [call.sequence for call in rank.waits if call.state == COLLECTIVE]
    is_gone = rank.state == GONE and not rank.has_finished
    kinds = (is_gone, rank.state == STOPPED, not rank.waits, True)
    return kinds.index(True), min(waits, default=0), rank.world
