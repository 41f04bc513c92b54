"""Decides on the first machine, for all: which rank has failed, and which calls wait too long."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from _chainermn_verdict import next_step

from .. import report
from ..diagnosis import Rank, WaitGraph, longest_wait, waits_of
from .printing import launchers_of

if TYPE_CHECKING:
    from .monitor import Monitor


class Judge:
    """Reports each failure once, by way of the first machine's monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        # When the last report or warning was printed. Calls that began before this time
        # are known.
        self._reported_at = -math.inf
        self._warned_at = -math.inf
        self._knows_failure = False

    def report_failure(self, ranks: Iterable[Rank], now: float) -> None:
        """Report which rank of the job died first, if one has: the launcher kills the others."""
        if self._knows_failure or not any(rank.has_failed for rank in ranks):
            return
        self._knows_failure = True
        monitor = self._monitor
        graph = monitor.collect(now)
        first = min(graph.ranks.values(), key=lambda rank: rank.failed_at)
        if first.has_aborted:
            return  # the rank itself has printed its error
        how = report.describe_state(graph, first)
        event = monitor.event(
            "rank_lost", lost=first.world, pid=first.pid, host=first.host, how=how
        )
        text = ""
        # Otherwise the launcher knows how the rank ended, and whether by Ctrl-C.
        if not event:
            who = report.describe_rank(graph, first)
            text = f"\n{report.PREFIX}{who}.\n{next_step(how)}\n"
        # The launcher is about to end the ranks, which can't print any more.
        monitor.print(text, event, launchers_of(monitor.local.ranks[0]))

    def report_calls(self, ranks: Iterable[Rank], now: float) -> None:
        """Report calls that wait too long, which may end the job; warn of them before."""
        timeout = self._monitor.local.timeout
        if not timeout.seconds:
            return
        since_report = now - self._reported_at
        longest = longest_wait(ranks, since_report)
        # A call that began after a link was cut may go by another network, and end.
        cut_for = now - self._monitor.other_machines.cut_at()
        patience = max(timeout.silence, cut_for)
        if longest > timeout.seconds:
            self._report(timeout.seconds, now)
        elif longest > patience:
            graph = self._monitor.collect(now)
            if waits_for_lost_alone(graph, patience):
                self._report(timeout.silence, now)
        elif longest > timeout.seconds / 2 and now - longest > self._warned_at:
            graph = self._monitor.collect(now)
            waits = waits_of(graph.ranks.values(), timeout.seconds / 2, since_report)
            if waits:
                self._warned_at = now
                rank, call = max(waits, key=lambda wait: wait[1].age)
                text = report.warning(graph, rank, call, timeout.seconds)
                self._monitor.print(text)

    def _report(self, longer_than: float, now: float) -> None:
        graph = self._monitor.collect(now, with_stacks=True)
        since_report = now - self._reported_at
        stalled = waits_of(graph.ranks.values(), longer_than, since_report)
        if stalled:
            self._monitor.report(graph, stalled)
            self._reported_at = now


def waits_for_lost_alone(graph: WaitGraph, seconds: float) -> bool:
    """Return whether all calls have waited for this time, and none waits for a reachable rank."""
    waits = waits_of(graph.ranks.values())
    if any(call.age < seconds for _, call in waits):
        return False
    return all(rank.is_lost for rank in graph.root_causes(waits))
