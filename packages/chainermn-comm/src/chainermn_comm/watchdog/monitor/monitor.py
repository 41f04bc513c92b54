"""What a monitor does: it looks at its machine's ranks, and judges for all if it is the hub."""

from __future__ import annotations

import math
import os
import selectors
import socket
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from typing import Any

from _chainermn_events import event_line
from _chainermn_verdict import next_step

from .. import processes, report
from ..diagnosis import Rank, WaitGraph, Waits, rank_from_reply
from ..processes import GONE
from ..status_region import IDLE, read_abort_time
from ..timeout import Timeout
from .cleanup import WAIT_SECONDS, SharedFiles, daemon_of, end_children, end_daemon
from .connection import Message
from .local_ranks import ExitTracker, MonitoredRank, collect_stacks, print_for, stderrs
from .star import Star

# Time between two looks: short enough for a report in time, and nothing taken from the
# ranks.
TICK_SECONDS = 0.5
# Time for the launcher to forward the report before the end; between SIGTERM and
# SIGKILL.
FORWARDING_SECONDS, TERM_SECONDS = 0.5, 1.0
# Time for the monitors of other machines to reply, who may ask for stacks; to say that
# a rank of theirs failed earlier; and for the hub to report, after which a spoke does.
REPLY_SECONDS, FAILED_SECONDS, HUB_SECONDS = 2.5, 0.3, 8.0
# Between two messages to the hub about calls that wait.
REPEAT_SECONDS = 1.0
# A monitor that comes so late was stopped, and the job with it (or the machine is very
# busy).
PAUSE_SECONDS = 2.0
# Characters of a text in an event.
PIECE = 500
# Time between MPI_Abort, which can't cross a cut link, and our own end of the ranks.
ABORT_SECONDS = 3.0


class Monitor:
    """Watches until the ranks have ended, or ends them.

    The hub judges for all machines, and a spoke, from what its own ranks do, where the
    hub doesn't.
    """

    def __init__(self, config: dict[str, Any], ranks: Sequence[MonitoredRank]) -> None:
        self.config, self.ranks = config, ranks
        self.files = SharedFiles([rank.process for rank in ranks])
        self.daemon = daemon_of(ranks[0].pid)
        self.timeout = Timeout(**config["timeout"])
        self.tick = min(TICK_SECONDS, self.timeout.seconds / 10 or TICK_SECONDS)
        # When calls were last reported, or warned of: all that began before are known.
        self.reported_at = self.warned_at = -math.inf
        # When this process stood still, and the ranks with it, and for how long.
        self.pauses: list[tuple[float, float]] = []
        self.must_end = self.ended_job = False
        self.selector = selectors.DefaultSelector()
        self.exits = ExitTracker(ranks, self.selector)
        listener = (
            None
            if config["listener"] is None
            else socket.socket(fileno=config["listener"])
        )
        silence = self.timeout.silence
        self.star = Star(self.selector, listener, config["star"], silence, self.hear)
        # For how long a call has waited elsewhere, as spokes say; when this one said
        # so.
        self.told, self.told_at = 0.0, -math.inf
        # Of each machine when a rank failed first, and which; None if it called
        # MPI_Abort.
        self.failures: list[tuple[float, Rank | None]] = []
        self.failure_due: float | None = None  # when the first of them is reported
        self.knows_failure, self.held = False, list[int]()
        # Since when machines are lost; the number of calls then; if that is known or
        # does no harm.
        self.lost_at, self.count_then, self.knows_loss = math.inf, 0, False

    def look(self) -> bool:
        """Look once, after a tick or what comes before; return whether there are still ranks."""
        before = time.monotonic()
        self.poll(self.tick)
        now = time.monotonic()
        if now - before > self.tick + PAUSE_SECONDS:
            self.pauses.append((now, now - before))
            self.star.tell("pause", seconds=now - before)
        self.note_failure()
        self.star.keep()
        self.files.keep(now)
        if all(rank.state() == GONE for rank in self.ranks):
            while not self.report_failure():
                self.poll(self.tick)
            return False
        self.report_failure()
        # MPI_Abort may fail to end the job. Their monitors tell of ranks elsewhere that
        # called it.
        aborts = [when for when, lost in self.failures if lost is None]
        aborts += [read_abort_time(rank.region) for rank in self.ranks]
        self.must_end |= any(0 < when < now - ABORT_SECONDS for when in aborts)
        if self.must_end or self.check_links(now) or self.check_calls(now):
            self.end_ranks()
            return False
        return True

    def poll(self, seconds: float) -> None:
        """Handle what comes of ranks and monitors; wait for it, but not longer."""
        for key, _ in self.selector.select(seconds):
            key.data()

    # What monitors say to one another.

    def hear(self, number: int, message: Message) -> None:
        """Do what another monitor says, the hub or the spoke of machine ``number``."""
        now, kind = time.monotonic(), message["kind"]
        if kind == "waits":
            if now - message["seconds"] > self.reported_at:
                self.told = max(self.told, message["seconds"])
        elif kind == "failed":
            lost = message["rank"] and rank_from_reply(message["rank"])
            self.add_failure(now - message["age"], lost)
            self.star.tell("reported", only=number)
        elif kind == "reported":
            self.failures, self.failure_due = [], self.failure_due or math.inf
        elif kind == "ask":
            found = self.describe(message["what"], now)
            self.star.tell(
                "reply", query=message["query"], ranks=list(map(asdict, found))
            )
        elif kind == "known":
            self.reported_at = now
        elif kind == "pause":
            self.pauses.append((now, message["seconds"]))
        elif kind == "end":  # and its ranks fail by that
            self.must_end, self.failure_due = True, math.inf

    def read(self, now: float) -> list[Rank]:
        return [rank.read(now) for rank in self.ranks]

    def describe(self, what: str, now: float) -> list[Rank]:
        """Return this machine's ranks, with their stacks if ``what`` is "stacks"."""
        ranks = self.read(now)
        stacks = collect_stacks(self.ranks) if what == "stacks" else {}
        return [replace(rank, stacks=stacks.get(rank.world, "")) for rank in ranks]

    def everyone(self, what: str, now: float) -> WaitGraph:
        """Return all machines' ranks, described as above."""
        replies = self.star.ask(what, REPLY_SECONDS, self.poll)
        ranks, silent = self.describe(what, now), []
        said = replies()
        for number, name in enumerate(self.star.names):
            if number != self.star.number:
                try:
                    ranks += map(rank_from_reply, said[number]["ranks"])
                except (LookupError, TypeError):
                    silent.append(name)
        return WaitGraph(ranks, silent)

    # Ranks that fail.

    def note_failure(self) -> None:
        """Notice the first failure here, while other ranks may still live."""
        now = time.monotonic()
        age = self.exits.since_failure(now)
        if age is None or self.knows_failure:
            return
        self.knows_failure = True
        first = self.exits.first_failure
        lost = None if first is None else first.read(now)
        self.add_failure(now - age, lost)
        if not self.star.is_hub:
            self.star.tell("failed", age=age, rank=lost and asdict(lost))
        self.report_failure()  # before the launcher ends
        self.files.scan()  # while other ranks may live

    def add_failure(self, when: float, lost: Rank | None) -> None:
        self.failures.append((when, lost))
        if self.failure_due is None:
            self.failure_due = time.monotonic() + (
                FAILED_SECONDS if self.star.links else 0.0
            )
            held = [os.dup(file) for file in stderrs(self.ranks[0].launchers)]
            # A file last: there mpiexec would write over it.
            self.held = sorted(
                held, key=lambda file: stat.S_ISREG(os.fstat(file).st_mode)
            )

    def report_failure(self) -> bool:
        """Report which rank ended badly first; return False while others may still say so."""
        if self.failure_due is None or self.failure_due == math.inf:
            return True
        if time.monotonic() < self.failure_due:
            return False
        self.failure_due = math.inf
        _, lost = min(self.failures, key=itemgetter(0), default=(0.0, None))
        if lost is not None:
            self.star.tell("reported")
            graph = WaitGraph([lost])
            how = report.describe_state(graph, lost)
            event = self.event(
                "rank_lost", lost=lost.world, pid=lost.pid, host=lost.host, how=how
            )
            who = report.describe_rank(graph, lost)
            # The launcher knows how it ended, and whether that was Ctrl-C.
            self.print(
                "" if event else f"\n{report.PREFIX}{who}.\n{next_step(how)}\n", event
            )
        while self.held:  # launchers wait for them
            os.close(self.held.pop())
        return True

    # Links that are cut, and calls that wait.

    def check_links(self, now: float) -> bool:
        """Report a machine that can't be reached, if calls wait; return whether that ends the job.

        Ranks may reach it by another network: then calls end that have ranks elsewhere.
        """
        lost = self.star.lost() if self.timeout.seconds else []
        if not lost:
            self.lost_at, self.knows_loss = math.inf, False
            return False
        graph = WaitGraph(self.read(now))
        calls = [call for rank in graph.ranks.values() for call in rank.calls]
        # With ranks elsewhere.
        calls = [call for call in calls if graph.num_unknown(call)]
        count = sum(call.sequence for call in calls)
        if self.lost_at == math.inf:
            # The next ones may be those that wait.
            self.lost_at, self.count_then = now, count + len(calls)
        idle = min((call.age for call in calls if call.state == IDLE), default=math.inf)
        self.knows_loss |= count > self.count_then or now - idle > self.lost_at
        if self.knows_loss:
            return False
        graph = self.everyone("calls", now)
        waiting = self.waits(graph, self.timeout.silence, now)
        # Those that can be reached must wait for others alone, each for the whole
        # silence.
        all_waiting = [call for rank in graph.ranks.values() for call in rank.waits]
        is_outside = any(not rank.is_lost for rank in graph.root_causes(waiting))
        if not waiting or is_outside or len(waiting) < len(all_waiting):
            return False
        self.knows_loss = True
        why, text = report.host_silent(lost, graph, waiting, self.timeout)
        ends_job = self.timeout.ends_job
        host = lost[0].rpartition(" ")[2]  # see `rendezvous`
        event = self.event("host_lost", host=host, reason=why, ends_job=ends_job)
        if ends_job:
            event += self.event("watchdog_abort", reason=why)
        self.print(text, event)
        return ends_job

    def check_calls(self, now: float) -> bool:
        """Report what waits too long; return whether that ends the job."""
        seconds, ends_job = self.timeout.seconds, self.timeout.ends_job
        if not seconds:
            return False
        waits = self.waits(
            WaitGraph(self.read(now)), seconds / 2, now, self.reported_at
        )
        longest = max(
            (call.age - self.paused(now - call.age) for _, call in waits), default=0.0
        )
        if self.star.is_hub:
            longest, self.told = max(longest, self.told), 0.0
            if seconds / 2 < longest <= seconds and now - longest > self.warned_at:
                self.warn(now)
        elif longest and now - self.told_at >= REPEAT_SECONDS:
            self.told_at = now
            self.star.tell("waits", seconds=longest)
        if longest <= seconds + (0.0 if self.star.is_hub else HUB_SECONDS):
            return False
        graph = self.everyone("stacks", now)
        stalled = self.waits(graph, seconds, now, self.reported_at)
        if not stalled:
            return False
        text = report.report(graph, stalled, self.timeout)
        event = (
            self.event("watchdog_abort", reason=report.reason(text)) if ends_job else []
        )
        self.star.tell("known")
        self.print(text, event)
        self.reported_at = self.warned_at = now
        return ends_job

    def warn(self, now: float) -> None:
        graph, seconds = self.everyone("calls", now), self.timeout.seconds
        if waiting := self.waits(graph, seconds / 2, now, self.reported_at):
            self.warned_at = now
            longest = max(waiting, key=lambda each: each[1].age)
            self.print(report.warning(graph, *longest, seconds))

    def waits(
        self, graph: WaitGraph, seconds: float, now: float, known: float = -math.inf
    ) -> Waits:
        """Return the calls that have waited for ``seconds`` and began after the time ``known``."""
        return [
            (rank, call)
            for rank in graph.ranks.values()
            if rank.state != GONE
            for call in rank.waits
            if now - call.age > known
            and call.age - self.paused(now - call.age) > seconds
        ]

    def paused(self, start: float) -> float:
        """Return for how long since then nobody can be said to have waited."""
        return sum(length for end, length in self.pauses if end > start)

    def event(self, kind: str, **fields: Any) -> list[bytes]:
        """Return an event for `chainermn launch` in the name of the first rank; see `print`."""
        job = self.config["launch"]
        return [event_line(job, self.ranks[0].world, kind, **fields)] if job else []

    def print(self, text: str, event: Sequence[bytes] = ()) -> None:
        """Print a text; through `chainermn launch` as events, lest it look like a rank's."""
        # If the job ends, the launcher says what to do next.
        if event and self.timeout.ends_job:
            text = text.partition("Next step")[0]
        pieces = [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        shown = [line for piece in pieces for line in self.event("report", shown=piece)]
        print_for(self.ranks, "" if shown else text, [*event, *shown], self.held)

    def end_ranks(self) -> None:
        """End all ranks of the job that can be reached."""
        self.ended_job = True
        self.files.scan()
        time.sleep(FORWARDING_SECONDS)
        self.star.tell("end")
        processes.terminate([rank.process for rank in self.ranks], TERM_SECONDS)

    def clean(self) -> None:
        """Leave nothing of ranks that have ended, but for children after a good end."""
        failed = self.ended_job or not all(rank.has_finished for rank in self.read(0.0))
        if failed:
            end_children([rank.process for rank in self.ranks])
        processes.wait_until(self.files.remove, WAIT_SECONDS)
        if failed and self.daemon:
            end_daemon(self.daemon)
