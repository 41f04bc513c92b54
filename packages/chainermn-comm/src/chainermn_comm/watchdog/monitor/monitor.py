"""What a monitor does: from the records of its machine's ranks to a report, and the job's end.

`Monitor.look` is called again and again. On the first machine it judges for all
machines: ranks that have failed (`report_failure`), and calls that wait
(`judge_calls`). The monitor of another machine pushes its ranks' records to the first
one's once a call waits or a rank has failed (`push_if_due`); the first one asks for
them, too, when it is about to report (`everyone`).
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from _chainermn_events import event_line
from _chainermn_verdict import next_step

from .. import processes, report
from ..diagnosis import Rank, WaitGraph, Waits
from ..processes import GONE
from ..timeout import Timeout
from .cleanup import WAIT_SECONDS, SharedFiles, end_children, end_daemon
from .first_machine import FirstMachine
from .link import Message
from .local_ranks import LocalSocket, MonitoredRank, collect_stacks
from .other_machines import OtherMachines
from .printing import held_launchers, print_for

# Time between two looks: short enough for a report in time, and nothing taken from the
# ranks.
TICK_SECONDS = 0.5
# For the first rank to say what it is: it has just started this process.
COME_SECONDS = 30.0
# Time for monitors of other machines to push what is asked for, stacks too; and to say
# that a rank of theirs failed earlier.
PUSH_SECONDS = 2.5
FAILED_SECONDS = 0.3
# Between two pushes of a machine on which a call waits.
REPEAT_SECONDS = 1.0
# For the first machine to report, after which one that is cut off ends its ranks.
CUT_OFF_SECONDS = 8.0
# A monitor that comes so late was stopped, and the job with it (or the machine is very
# busy).
PAUSE_SECONDS = 2.0
# Time for the launcher to forward the report before the end; between SIGTERM and
# SIGKILL.
FORWARDING_SECONDS = 0.5
TERM_SECONDS = 1.0
# Time between MPI_Abort, which can't cross a cut link, and our own end of the ranks.
ABORT_SECONDS = 3.0
# Characters of a text in an event.
PIECE = 500


class Monitor:
    """Watches the ranks of a machine until they have ended, or ends them."""

    def __init__(self, listener: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.socket = LocalSocket(listener, self.selector, self.hear_rank, self.answer)
        self.ranks: list[MonitoredRank] = []
        self.files = SharedFiles()
        # What the ranks say: the launch, if it is one of `chainermn launch`; the
        # time-out; which ranks are to come; whether they have met.
        self.launch: str | None = None
        self.timeout = Timeout(0.0)
        self.members: set[int] = set()
        self.have_met = False
        # Of several machines, the first one has others, and each other one has a first.
        self.other_machines = OtherMachines(self.selector)
        self.first_machine: FirstMachine | None = None
        # When this process began, or went on after it had stood still, and the ranks
        # with it.
        self.awake_since = time.monotonic()
        # When calls were last reported, or warned of: all that began before are known.
        self.reported_at = -math.inf
        self.warned_at = -math.inf
        # When this machine pushed last, and when the first one asked all last.
        self.pushed_at = -math.inf
        self.asked_at = -math.inf
        self.knows_failure = False
        self.must_end = False

    def look(self) -> bool:
        """Look at the ranks once, after a tick or a message; return whether to go on."""
        tick = min(TICK_SECONDS, self.timeout.seconds / 10 or TICK_SECONDS)
        began = time.monotonic()
        self.handle_messages(tick)
        now = time.monotonic()
        if now - began > tick + PAUSE_SECONDS:
            self.awake_since = now
        self.files.keep(now)
        ranks = self.read_ranks(now)
        if self.first_machine is not None:
            self.first_machine.keep(now)
            self.push_if_due(ranks, now)
            self.must_end |= self.is_cut_off(ranks)
        else:
            self.other_machines.keep(now)
            self.report_failure()
            self.must_end |= self.judge_calls(now)
        if self.must_end or self.has_aborted_in_vain(now):
            self.end_ranks()
            return False
        if not ranks:
            return now < self.awake_since + COME_SECONDS
        return any(rank.state != GONE for rank in ranks)

    def handle_messages(self, seconds: float) -> None:
        """Handle what ranks and monitors send; wait for it, but not longer."""
        for key, _ in self.selector.select(seconds):
            key.data()

    # What the ranks of this machine say, and what they record.

    def hear_rank(
        self, message: dict[str, Any], files: list[int]
    ) -> MonitoredRank | None:
        """Handle a rank's message; return the rank if it has come by that."""
        kind = message["kind"]
        if kind == "come":
            return self.add_rank(message, files)
        if kind == "met":
            self.timeout = Timeout(**message["timeout"])
            self.have_met = True
        elif kind == "first machine":
            self.other_machines.listen(files[0], message, self.timeout.silence)
        elif kind == "other machine" and self.first_machine is None:
            self.first_machine = FirstMachine(
                self.selector, message, self.timeout.silence, self.hear_first_machine
            )
        return None

    def add_rank(self, message: dict[str, Any], files: list[int]) -> MonitoredRank:
        rank = MonitoredRank(message, *files)
        self.ranks.append(rank)
        self.ranks.sort(key=lambda each: each.world)
        self.files.add(rank.process)
        self.launch = message["launch"]
        if not self.have_met:
            self.members.update(message["members"])
            self.timeout = Timeout(**message["timeout"])
        return rank

    def read_ranks(self, now: float, with_stacks: bool = False) -> list[Rank]:
        """Return what this machine's ranks do."""
        ranks = [rank.read(now, self.awake_since) for rank in self.ranks]
        if not with_stacks:
            return ranks
        stacks = collect_stacks(self.ranks)
        return [replace(rank, stacks=stacks.get(rank.world, "")) for rank in ranks]

    def answer(self, what: str) -> dict[str, Any]:
        """Return "calls" of all ranks that can be seen, or their "stacks", too."""
        graph = self.everyone(time.monotonic(), with_stacks=what == "stacks")
        return {
            "ranks": [asdict(rank) for rank in graph.ranks.values()],
            "unseen": graph.unreachable,
        }

    # A machine that isn't the first.

    def push_if_due(self, ranks: list[Rank], now: float) -> None:
        """Push the ranks' records to the first machine if a rank has failed, or a call waits."""
        has_failed = any(rank.failed_for is not None for rank in ranks)
        if has_failed and not self.knows_failure:
            self.knows_failure = True
            self.push(ranks)
            self.files.scan()  # while other ranks may live
        patience = min(self.timeout.seconds / 2, self.timeout.silence)
        is_waiting = 0 < patience < longest_wait(ranks)
        if is_waiting and now - self.pushed_at > REPEAT_SECONDS:
            self.push(ranks)

    def push(self, ranks: list[Rank], has_stacks: bool = False) -> None:
        if self.first_machine is not None:
            self.pushed_at = time.monotonic()
            records = [asdict(rank) for rank in ranks]
            self.first_machine.send("records", ranks=records, has_stacks=has_stacks)

    def hear_first_machine(self, message: Message) -> None:
        """End the ranks, or push their records, which are asked for."""
        if message["kind"] == "end":
            self.must_end = True
        else:
            with_stacks = message["with_stacks"]
            self.push(self.read_ranks(time.monotonic(), with_stacks), with_stacks)

    def is_cut_off(self, ranks: list[Rank]) -> bool:
        """Return whether a call has waited too long, and the first machine can't report it."""
        assert self.first_machine is not None
        seconds = self.timeout.seconds
        if self.first_machine.is_linked or not self.timeout.ends_job:
            return False
        if longest_wait(ranks) < seconds + CUT_OFF_SECONDS:
            return False
        graph = WaitGraph(ranks, [self.first_machine.name])
        self.report_calls(graph, graph.waits(seconds))
        return True

    # The first machine: what all ranks do.

    def everyone(self, now: float, with_stacks: bool = False) -> WaitGraph:
        """Return what the ranks of all machines do, as far as their monitors say so in time."""
        self.other_machines.send("push", with_stacks=with_stacks)
        ranks = self.read_ranks(now, with_stacks)
        left = PUSH_SECONDS
        while self.other_machines.silent(now, with_stacks) and left > 0:
            self.handle_messages(left)
            left = now + PUSH_SECONDS - time.monotonic()
        self.asked_at = time.monotonic()
        unreachable = [
            *(link.name for link in self.other_machines.silent(now, with_stacks)),
            *(link.name for link in self.other_machines.lost.values()),
        ]
        if self.first_machine is not None:
            unreachable.append(self.first_machine.name)
        ranks += self.other_machines.pushed_since(now)
        missing: set[int] = set()
        if not self.have_met:
            missing = self.members - {rank.world for rank in ranks}
        return WaitGraph(ranks, unreachable, missing)

    def failures(self) -> list[tuple[float, Rank]]:
        """Return when ranks of all machines called MPI_Abort or died, and which."""
        now = time.monotonic()
        known = [(now, rank) for rank in self.read_ranks(now)]
        # A monitor whose ranks have all ended says so, and goes.
        lost = self.other_machines.lost.values()
        for link in (*self.other_machines.linked, *lost):
            known += [(link.pushed_at, rank) for rank in link.ranks]
        return [
            (read_at - rank.failed_for, rank)
            for read_at, rank in known
            if rank.failed_for is not None
        ]

    def has_aborted_in_vain(self, now: float) -> bool:
        """Return whether a rank has called MPI_Abort, which may hang, some time ago."""
        return any(
            rank.has_aborted and failed_at < now - ABORT_SECONDS
            for failed_at, rank in self.failures()
        )

    # The first machine: ranks that fail, and calls that wait.

    def report_failure(self) -> None:
        """Report which rank of the job died first, if one has: the launcher kills the others."""
        if self.knows_failure or not self.failures():
            return
        self.knows_failure = True
        with held_launchers(self.ranks[0]) as held:
            self.files.scan()  # while other ranks may live
            if self.other_machines.linked:
                self.wait(FAILED_SECONDS)
            _, first = min(self.failures(), key=lambda failure: failure[0])
            if first.has_aborted:
                return  # it has said why itself
            graph = WaitGraph([first])
            how = report.describe_state(graph, first)
            event = self.event(
                "rank_lost", lost=first.world, pid=first.pid, host=first.host, how=how
            )
            text = ""
            if not event:  # else the launcher knows how, and whether by Ctrl-C
                who = report.describe_rank(graph, first)
                text = f"\n{report.PREFIX}{who}.\n{next_step(how)}\n"
            self.print(text, event, held)

    def wait(self, seconds: float) -> None:
        """Handle messages for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.handle_messages(left)

    def judge_calls(self, now: float) -> bool:
        """Report calls that wait too long; return whether that ends the job."""
        seconds = self.timeout.seconds
        if not seconds:
            return False
        since_report = now - self.reported_at
        ranks = self.read_ranks(now) + self.other_machines.pushed_since(self.asked_at)
        longest = longest_wait(ranks, since_report)
        if longest > seconds:
            limit = seconds
        elif longest > self.timeout.silence and self.is_waiting_for_cut_link(now):
            limit = self.timeout.silence
        else:
            if longest > seconds / 2 and now - longest > self.warned_at:
                self.warn(now)
            return False
        graph = self.everyone(now, with_stacks=True)
        stalled = graph.waits(limit, since_report)
        if not stalled:
            return False
        self.report_calls(graph, stalled)
        self.reported_at = now
        self.warned_at = now
        return self.timeout.ends_job

    def warn(self, now: float) -> None:
        """Print, at half the time-out, which rank a call waits for."""
        seconds = self.timeout.seconds
        graph = self.everyone(now)
        waits = graph.waits(seconds / 2, now - self.reported_at)
        if waits:
            self.warned_at = now
            rank, call = max(waits, key=lambda wait: wait[1].age)
            self.print(report.warning(graph, rank, call, seconds))

    def is_waiting_for_cut_link(self, now: float) -> bool:
        """Return whether all calls that wait do so for ranks behind a link that was cut.

        Ranks may reach these by another network: a call that began after the cut says
        nothing.
        """
        cut_at = self.other_machines.cut_at()
        if cut_at is None:
            return False
        graph = self.everyone(now)
        waits = graph.waits()
        if any(not rank.is_lost for rank in graph.root_causes(waits)):
            return False
        return all(
            call.age > self.timeout.silence and now - call.age < cut_at
            for _, call in waits
        )

    # Reports, and the end.

    def report_calls(self, graph: WaitGraph, stalled: Waits) -> None:
        text = report.report(graph, stalled, self.timeout)
        events = []
        if self.timeout.ends_job:
            events = self.event("watchdog_abort", reason=report.reason(text))
        self.print(text, events)

    def event(self, kind: str, **fields: Any) -> list[bytes]:
        """Return an event for `chainermn launch` in the name of the first rank; see `print`."""
        if self.launch is None:
            return []
        return [event_line(self.launch, self.ranks[0].world, kind, **fields)]

    def print(
        self, text: str, events: Sequence[bytes] = (), held: Sequence[int] = ()
    ) -> None:
        """Print a text; through `chainermn launch` as events, lest it look like a rank's."""
        if self.launch is not None:
            if events and self.timeout.ends_job:
                # The launcher says what to do next.
                text = text.partition("Next step")[0]
            events = list(events)
            for start in range(0, len(text), PIECE):
                events += self.event("report", shown=text[start : start + PIECE])
            text = ""
        print_for(self.ranks, text, events, held)

    def end_ranks(self) -> None:
        """End all ranks of the job that can be reached."""
        self.must_end = True
        self.files.scan()
        time.sleep(FORWARDING_SECONDS)
        self.other_machines.send("end")
        processes.terminate([rank.process for rank in self.ranks], TERM_SECONDS)

    def clean(self) -> None:
        """Leave nothing of ranks that have ended, but for children after a good end."""
        ranks = self.read_ranks(time.monotonic())
        has_failed = self.must_end or not all(rank.has_finished for rank in ranks)
        if has_failed:
            end_children([rank.process for rank in self.ranks])
        processes.wait_until(self.files.remove, WAIT_SECONDS)
        if has_failed and self.ranks:
            end_daemon(self.ranks[0].launcher)


def longest_wait(ranks: Iterable[Rank], shorter_than: float = math.inf) -> float:
    """Return for how long the call of these has waited that has for longest."""
    ages = [call.age for _, call in WaitGraph(ranks).waits(0.0, shorter_than)]
    return max(ages, default=0.0)
