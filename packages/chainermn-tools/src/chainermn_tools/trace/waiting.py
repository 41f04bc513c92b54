"""Finds out who waited for whom: calls of different ranks that belong together."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

from chainermn_tools.trace.reading import Call, Run


@dataclass(frozen=True)
class Meeting:
    """One collective call of several ranks, all of which are known.

    Attributes:
        calls: one a rank.
        last: the call of the rank that came last.
    """

    calls: tuple[Call, ...]
    last: Call

    @property
    def waited(self) -> float:
        """Microseconds that all others waited together."""
        return sum(call.waited for call in self.calls)


def match(run: Run) -> tuple[list[Meeting], int]:
    """Note in each call for how long it waited, and for whom; times must be aligned.

    Returns:
        The collective calls of more than one rank, in the order of time, and how many lack ranks.
    """
    _match_messages(run)
    return _meetings(run)


def _meetings(run: Run) -> tuple[list[Meeting], int]:
    members = {name: ranks for trace in run.ranks.values() for name, ranks in trace.members.items()}
    together: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
    for call in run.calls:
        if call.sequence is not None:
            together[call.communicator, call.sequence][call.rank] = call
    meetings, incomplete = [], 0
    for (communicator, _), calls in together.items():
        wanted = members.get(communicator, [])
        if calls.keys() != set(wanted):
            incomplete += 1
        elif len(wanted) > 1:
            meetings.append(_meeting(tuple(calls.values())))
    return sorted(meetings, key=lambda one: one.last.start), incomplete


def _meeting(calls: tuple[Call, ...]) -> Meeting:
    last = max(calls, key=lambda call: call.start)
    for call in calls:
        if call is not last:
            _wait(call, last)
    return Meeting(calls, last)


def _match_messages(run: Run) -> None:
    """The k-th that is sent is the k-th that is received, for each pair of ranks and tag."""
    sent: dict[tuple[object, ...], deque[Call]] = defaultdict(deque)
    received: dict[tuple[object, ...], deque[Call]] = defaultdict(deque)
    for trace in run.ranks.values():
        for call in sorted(trace.calls, key=lambda one: one.start):
            members = trace.members.get(call.communicator, [])
            if call.sequence is None and call.peer is not None and call.peer < len(members):
                peer = members[call.peer]
                if call.operation.startswith("send"):
                    sent[call.communicator, call.rank, peer, call.tag].append(call)
                else:
                    received[call.communicator, peer, call.rank, call.tag].append(call)
    for key, sends in sent.items():
        for send, recv in zip(sends, received[key], strict=False):
            recv.nbytes = recv.nbytes or send.nbytes
            _wait(*((send, recv) if send.start < recv.start else (recv, send)))


def _wait(early: Call, late: Call) -> None:
    early.waited = max(0.0, min(late.start, early.end) - early.start)
    early.late = late.rank
