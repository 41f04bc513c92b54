"""Finds out which rank keeps the others waiting, from the calls of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .processes import GONE, RUNNING, STOPPED
from .status_region import COLLECTIVE, FINALIZE, MESSAGE, WORLD, Call


@dataclass(frozen=True)
class Rank:
    """The process of a rank, and the rank's calls."""

    world: int  # its number in MPI.COMM_WORLD
    host: str  # name of its machine
    pid: int
    state: str  # RUNNING, STOPPED or GONE
    # The call that it is in, or was in last, on each of its communicators.
    calls: tuple[Call, ...] = ()
    # The stacks of its threads; empty if they weren't asked for, or didn't come.
    stacks: str = ""
    updates: int = 0  # calls of any multi-node optimizer's `update` until now
    examples: int = 0  # examples in these calls, as far as known
    # When the rank died or called MPI_Abort, by the clock of the machine that reads
    # this record; infinity if the rank lives, or its program had ended.
    failed_at: float = math.inf
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
    def has_failed(self) -> bool:
        return self.failed_at < math.inf

    @property
    def is_lost(self) -> bool:
        """Whether it is stopped, or gone before its program was over."""
        return self.state == STOPPED or (self.state == GONE and not self.has_finished)


def rank_from_json(fields: dict[str, Any], later: float = 0.0) -> Rank:
    """Return a rank from a monitor's record; that monitor's clock is ``later`` seconds behind."""
    calls = tuple(Call(**call) for call in fields["calls"])
    failed_at = fields["failed_at"] + later
    return Rank(**{**fields, "calls": calls, "failed_at": failed_at})


Waits = Sequence[tuple[Rank, Call]]  # ranks, each with a call that it is in


def waits_of(
    ranks: Iterable[Rank], longer_than: float = 0.0, shorter_than: float = math.inf
) -> Waits:
    """Return the calls of living ranks that have waited for a time between these limits."""
    return [
        (rank, call)
        for rank in ranks
        if rank.state != GONE
        for call in rank.waits
        if longer_than < call.age < shorter_than
    ]


def longest_wait(ranks: Iterable[Rank], shorter_than: float = math.inf) -> float:
    """Return the longest time that a call of these ranks has waited, in seconds."""
    waits = waits_of(ranks, shorter_than=shorter_than)
    return max((call.age for _, call in waits), default=0.0)


class WaitGraph:
    """The ranks, and which of them wait for which."""

    def __init__(
        self,
        ranks: Iterable[Rank],
        unreachable: Iterable[str] = (),
        members: Iterable[int] = (),
    ) -> None:
        """Make it.

        Args:
            ranks: the ranks whose calls are known.
            unreachable: the names of machines whose monitors don't answer.
            members: the ranks that make the first communicator, before they have met.
        """
        self.ranks = {rank.world: rank for rank in ranks}
        self.unreachable = list(unreachable)
        # Haven't reached this call.
        self.missing = sorted(set(members) - self.ranks.keys())
        self._members: dict[int, dict[int, tuple[Rank, Call]]] = {}
        for rank in self.ranks.values():
            for call in rank.calls:
                self._members.setdefault(call.communicator, {})[call.rank] = rank, call

    def peer_name(self, call: Call) -> str:
        """Return the number in MPI.COMM_WORLD of the call's other rank or root, if known."""
        found = self._members.get(call.communicator, {}).get(call.peer)
        if found is None:
            return f"{call.peer} of its communicator"
        return str(found[0].world)

    def num_unknown(self, call: Call) -> int:
        """Return the number of ranks of the call's communicator of which nothing is known."""
        if call.communicator == WORLD:
            return max(0, call.size - len(self.ranks))
        return call.size - len(self._members[call.communicator])

    def waits_for(self, rank: Rank, call: Call) -> list[Rank]:
        """Return the ranks that must act before the call of this rank can end."""
        if call.communicator == WORLD:
            return [
                other
                for other in self.ranks.values()
                if other.is_lost or (other.state == RUNNING and not other.waits)
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
        """Return the ranks for which these calls wait in the end, the likeliest first.

        These are the awaited ranks that themselves wait for no rank, or all of them if
        all wait for each other. There are none if nothing is known of the awaited ranks.
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


def _likelihood(rank: Rank) -> tuple[bool, bool, bool, int, int]:
    """Return a sort key: first ranks that are gone, stopped, in no call, or calls behind."""
    sequences = [call.sequence for call in rank.waits if call.state == COLLECTIVE]
    return (
        not rank.is_lost,
        rank.state == STOPPED,
        bool(rank.waits),
        min(sequences, default=0),
        rank.world,
    )
