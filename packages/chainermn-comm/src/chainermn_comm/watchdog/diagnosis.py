"""Finds out which rank keeps the others waiting, from what all of them do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .processes import GONE, RUNNING, STOPPED
from .status_region import COLLECTIVE, EVERYBODY, FINALIZE, MESSAGE, Call, Doing


@dataclass(frozen=True)
class Rank:
    """What a rank does.

    Attributes:
        world: its number in MPI.COMM_WORLD.
        host: name of its machine.
        pid: its process there.
        state: RUNNING, STOPPED or GONE.
        calls: what it does, or did last, on each of its communicators.
        stacks: of its threads, in words; empty where they weren't asked for or didn't come.
        doing: what it is inside of, if it said so.
    """

    world: int
    host: str
    pid: int
    state: str
    calls: tuple[Call, ...] = ()
    stacks: str = ""
    doing: Doing | None = None

    @property
    def waits(self) -> list[Call]:
        """The calls that it is in."""
        return [call for call in self.calls if call.waits]

    @property
    def has_ended(self) -> bool:
        """Whether its program is over; its process may wait in MPI_Finalize, or be gone."""
        return any(call.operation == FINALIZE for call in self.waits)

    @property
    def works_alone(self) -> bool:
        """Whether it is busy with what it said may take long."""
        busy = self.state == RUNNING and not self.waits
        return busy and self.doing is not None and self.doing.alone

    @property
    def is_lost(self) -> bool:
        """Whether it is stopped, or gone before its program was over."""
        return self.state == STOPPED or (self.state == GONE and not self.has_ended)


def from_answer(answer: dict[str, Any]) -> list[Rank]:
    """The ranks of another machine, as its monitor tells of them."""
    return [
        Rank(
            **{
                **rank,
                "calls": tuple(
                    Call(**{**call, "communicator": tuple(call["communicator"])})
                    for call in rank["calls"]
                ),
                "doing": rank["doing"] and Doing(**rank["doing"]),
            }
        )
        for rank in answer["ranks"]
    ]


# In what faulthandler prints, the innermost Python function of each thread.
INNERMOST = re.compile(r'hread.*\(most recent call first\):\n\s+File "([^"]+)", line (\d+) in (.+)')
# Where a rank that communicates is.
COMMUNICATING = ("/chainermn_comm/", "/mpi4py/")


class Job:
    """The ranks, and who waits for whom."""

    def __init__(self, ranks: Iterable[Rank], silent: Iterable[str] = ()) -> None:
        """Know of these ranks, and of hosts whose monitor didn't answer."""
        self.ranks = {rank.world: rank for rank in ranks}
        self.silent = tuple(silent)
        self._members: dict[tuple[int, int], dict[int, tuple[Rank, Call]]] = {}
        for rank in self.ranks.values():
            for call in rank.calls:
                self._members.setdefault(call.communicator, {})[call.rank] = rank, call

    def world_rank(self, call: Call, rank: int) -> int | None:
        """The world's number of a rank of the call's communicator, if we know of it."""
        found = self._members.get(call.communicator, {}).get(rank)
        return found[0].world if found else None

    def unknown(self, call: Call) -> int:
        """How many ranks of the call's communicator we know nothing of."""
        if call.communicator == EVERYBODY:
            return max(0, call.size - len(self.ranks))
        return call.size - len(self._members[call.communicator])

    def waited_for(self, rank: Rank, call: Call) -> list[Rank]:
        """Those that must do something before the call of this rank can end."""
        if call.communicator == EVERYBODY:
            return [other for other in self.ranks.values() if other.is_lost or _is_elsewhere(other)]
        members = self._members[call.communicator]
        if call.state == MESSAGE:
            other, theirs = members.get(call.peer, (None, None))
            if other is None or theirs is None or _meet(call, theirs):
                return []
            return [other]
        return [
            other
            for other, theirs in members.values()
            if other is not rank and (theirs.sequence < call.sequence or other.is_lost)
        ]

    def suspects(self, stalled: Sequence[tuple[Rank, Call]]) -> list[Rank]:
        """The ranks for which, in the end, these calls wait; the likeliest first.

        From who waits for whom, those that themselves wait for nobody. Where all wait for one
        another, all of them; none where they wait for ranks that we know nothing of.
        """
        reached: dict[int, Rank] = {rank.world: rank for rank, _ in stalled if rank.is_lost}
        ends = dict(reached)
        todo = list(stalled)
        others = False  # whether some wait for ranks that we know nothing of
        while todo:
            rank, call = todo.pop()
            found = self.waited_for(rank, call)
            # Of a message it is known, and told, who else is waited for.
            others = others or (not found and call.state == COLLECTIVE and self.unknown(call) > 0)
            for other in found:
                if other.world in reached:
                    continue
                reached[other.world] = other
                if other.is_lost or not other.waits or other.has_ended:
                    ends[other.world] = other
                else:
                    todo += [(other, theirs) for theirs in other.waits]
        return sorted((ends or ({} if others else reached)).values(), key=_likelihood)

    def strangers(self, stalled: Sequence[tuple[Rank, Call]]) -> list[tuple[Rank, str]]:
        """Ranks that run something else inside of the call that all are in, and what.

        Such as a handler of a signal. Only their stacks tell; none where that holds for all.
        """
        if self.silent or any(self.unknown(call) for _, call in stalled):
            return []
        found, others = [], 0
        for rank in self.ranks.values():
            if not rank.waits or not rank.stacks:
                continue
            frames = INNERMOST.findall(rank.stacks)
            here = any(folder in frame[0] for frame in frames for folder in COMMUNICATING)
            if here or not frames:  # Python's code has ended: it is in MPI_Finalize
                others += 1
            else:
                path, line, name = frames[0]
                found.append((rank, f"{name} ({os.path.basename(path)}, line {line})"))
        return found if others else []

    def with_stacks(self, stacks: dict[int, str]) -> Job:
        """The same with the stacks of the ranks that gave them."""
        return Job(
            (
                replace(rank, stacks=stacks.get(rank.world, rank.stacks))
                for rank in self.ranks.values()
            ),
            self.silent,
        )


def _is_elsewhere(rank: Rank) -> bool:
    return rank.state == RUNNING and not rank.waits


def _meet(one: Call, other: Call) -> bool:
    """Whether two calls are the two ends of one message, which may be on its way."""
    return (
        other.state == MESSAGE
        and other.peer == one.rank
        and other.tag == one.tag
        and {one.operation[:4], other.operation[:4]} == {"send", "recv"}
    )


def _likelihood(rank: Rank) -> tuple[int, int, int]:
    waits = [call.sequence for call in rank.waits if call.state == COLLECTIVE]
    kind = (
        0
        if rank.state == GONE and not rank.has_ended
        else 1
        if rank.state == STOPPED
        else 2
        if not rank.waits
        else 3
    )
    return kind, min(waits, default=0), rank.world
