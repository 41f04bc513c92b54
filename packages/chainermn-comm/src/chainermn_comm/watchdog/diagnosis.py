"""Finds out which rank keeps the others waiting, from what all of them do."""

from __future__ import annotations

import math
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
    # For how many seconds it has been dead, or since it called MPI_Abort; None if it
    # lives, or its program was over.
    failed_for: float | None = None
    has_aborted: bool = False  # whether it called MPI_Abort

    @property
    def waits(self) -> list[Call]:
        return [call for call in self.calls if call.waits]

    @property
    def last_call(self) -> Call | None:
        """The call that it is in, or was in last."""
        named = [call for call in self.calls if call.operation]
        return min(named, key=lambda call: call.age, default=None)

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


def rank_from_json(fields: dict[str, Any]) -> Rank:
    """Return a rank as a monitor has sent it."""
    calls = []
    for call in fields["calls"]:
        communicator = tuple(call["communicator"])
        calls.append(Call(**{**call, "communicator": communicator}))
    return Rank(**{**fields, "calls": tuple(calls)})


Waits = Sequence[tuple[Rank, Call]]  # ranks, each with a call that it is in


class WaitGraph:
    """The ranks, and which of them wait for which."""

    def __init__(
        self,
        ranks: Iterable[Rank],
        unreachable: Iterable[str] = (),
        missing: Iterable[int] = (),
    ) -> None:
        """Make it.

        Args:
            ranks: of which it is known what they do.
            unreachable: the machines of which nothing is known.
            missing: ranks that haven't come to the first communicator on this machine.
        """
        self.ranks = {rank.world: rank for rank in ranks}
        self.unreachable = list(unreachable)
        self.missing = sorted(missing)
        self._members: dict[tuple[int, int], dict[int, tuple[Rank, Call]]] = {}
        for rank in self.ranks.values():
            for call in rank.calls:
                self._members.setdefault(call.communicator, {})[call.rank] = rank, call

    def waits(self, longer_than: float = 0.0, shorter_than: float = math.inf) -> Waits:
        """Return the calls that have waited for a time between these."""
        return [
            (rank, call)
            for rank in self.ranks.values()
            if rank.state != GONE
            for call in rank.waits
            if longer_than < call.age < shorter_than
        ]

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
        causes = {rank.world: rank for rank, _ in stalled if rank.is_lost}
        reached = dict(causes)
        todo = list(stalled)
        waits_for_unknown = False
        while todo:
            rank, call = todo.pop()
            others = self.waits_for(rank, call)
            # A message's report names the other rank.
            if not others and call.state == COLLECTIVE:
                waits_for_unknown |= self.num_unknown(call) > 0
            for other in others:
                if other.world in reached:
                    continue
                reached[other.world] = other
                if other.is_lost or not other.waits or other.has_finished:
                    causes[other.world] = other
                else:
                    todo += [(other, theirs) for theirs in other.waits]
        if not causes and not waits_for_unknown:
            causes = reached
        return sorted(causes.values(), key=_likelihood)


def _likelihood(rank: Rank) -> tuple[int, int, int]:
    """Return a key that sorts first: gone, stopped, in no call, behind the others' calls."""
    if rank.state == GONE and not rank.has_finished:
        kind = 0
    elif rank.state == STOPPED:
        kind = 1
    elif not rank.waits:
        kind = 2
    else:
        kind = 3
    sequences = [call.sequence for call in rank.waits if call.state == COLLECTIVE]
    return kind, min(sequences, default=0), rank.world
