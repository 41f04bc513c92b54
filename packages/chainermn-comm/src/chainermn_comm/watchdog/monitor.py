"""The process that watches the ranks of one machine; it needs none of them to reply."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from _chainermn_events import event_line

from ..timeout import Timeout
from . import processes, report
from .cleanup import Launcher, SharedFiles, clean
from .diagnosis import WaitGraph, Waits
from .local_ranks import ExitTracker, MonitoredRank, collect_stacks, print_for
from .monitor_tree import MonitorTree
from .processes import GONE
from .status_region import read_abort_time

# Time between two looks: short enough for a report in time, and nothing taken from the ranks.
TICK_SECONDS = 0.5
# Age up to which a rank's stacks are not asked for again.
FRESH_SECONDS = 2.0
# Time between the report and the end of the job, for the launcher to forward the report.
FORWARDING_SECONDS = 0.5
# Time between SIGTERM and SIGKILL.
TERM_SECONDS = 1.0
# Time for the monitors of other machines to reply; they may have to ask for stacks.
REPLY_SECONDS = 2.2
# Time for other monitors to say whether a rank of theirs failed, and for them to query this one.
FAILED_SECONDS, LINGER_SECONDS = 1.0, 1.5
# A monitor that comes so late was stopped, and the job with it (or the machine is very busy).
PAUSE_SECONDS = 2.0
# Time between MPI_Abort, which can't cross a cut link, and our own end of the ranks.
ABORT_SECONDS = 3.0
# Time that a call may wait for a rank whose work is exempt, whatever the time-out.
EXEMPT_SECONDS = 600.0
# How many monitors are started, one after another, where each fails.
ATTEMPTS = 3


class Monitor:
    """Watches until the ranks have ended, or ends them."""

    def __init__(self, config: dict[str, Any], ranks: Sequence[MonitoredRank]) -> None:
        self.config, self.ranks = config, ranks
        self.files = SharedFiles([rank.process for rank in ranks])
        self.launcher = Launcher(ranks[0].pid)
        self.timeout = Timeout(**config["timeout"])
        self.tick = min(TICK_SECONDS, self.timeout.seconds / 10)
        # When calls were last reported, or warned of: all that began before are known.
        self.reported_at = self.warned_at = -math.inf
        # Exempt work that has been reported.
        self.exempted: set[tuple[int, str]] = set()
        # When this process stood still, and the ranks with it, and for how long.
        self.pauses: list[tuple[float, float]] = []
        self.tree = MonitorTree(config["tree"], self.timeout.silence, self.reply)
        # Whether a neighbour is silent that has been reported, or that another monitor reports.
        self.knows_silence = False
        self.stacks_lock = threading.Lock()
        self.last_stacks: dict[int, str] = {}
        self.stacks_at = -FRESH_SECONDS
        self.exits = ExitTracker(ranks, self.files.inotify)
        self.ended_job = False

    def start_network(self) -> None:
        """Begin to reply to the monitors of other machines, and to poll the neighbours'."""
        self.tree.serve([socket.socket(fileno=one) for one in self.config["listeners"]])
        self.tree.poll()

    def reply(self, kind: str) -> dict[str, Any]:
        """Reply to "alive", "failed", "calls", or "stacks", which asks for calls and stacks."""
        stacks = self.stacks() if kind == "stacks" else {}
        now = time.monotonic()
        ranks = [replace(one.read(now), stacks=stacks.get(one.world, "")) for one in self.ranks]
        if kind == "failed":
            return {"failed": self.exits.since_failure(now)}
        if kind == "alive":
            return {"finished": all(rank.has_finished for rank in ranks)}
        return {"ranks": list(map(asdict, ranks))}

    def run(self) -> None:
        while True:
            before = time.monotonic()
            files_were_made = self.exits.wait(self.tick)
            now = time.monotonic()
            if now - before > self.tick + PAUSE_SECONDS:
                self.pauses.append((now, now - before))
            self.report_first_failure()
            if files_were_made:
                self.files.rescan()
            if all(rank.state() == GONE for rank in self.ranks):
                return
            aborts = [read_abort_time(rank.region) for rank in self.ranks]
            if any(0 < since < now - ABORT_SECONDS for since in aborts):
                self.end_ranks()
                return
            if self.check_neighbours(now) or self.check_calls(now):
                return

    def report_first_failure(self) -> None:
        """Report which rank ended badly first, without having called MPI_Abort."""
        rank, self.exits.first_failure = self.exits.first_failure, None
        if rank is None:
            return
        others = self.tree.query("failed", FAILED_SECONDS)()
        now = time.monotonic()
        own = self.exits.since_failure(now) or 0.0
        # The end of a machine's last rank has reached the launcher before this one.
        if not others.has_finished and all(age <= own for age in others.failed):
            lost = rank.read(now)
            graph = WaitGraph([lost])
            how = report.describe_state(graph, lost).removeprefix("is ")
            event = self.event("rank_lost", lost=lost.world, pid=lost.pid, host=lost.host, how=how)
            self.print(f"{report.PREFIX}{report.describe_rank(graph, lost)}.\n", event)

    def check_neighbours(self, now: float) -> bool:
        """Report a neighbour that was heard and is silent; return whether that ends us."""
        silent = [
            (number, peer)
            for number, peer in self.tree.neighbours.items()
            if (last := peer.last_heartbeat) is not None
            and not peer.has_finished
            and now - last - self.paused(last) > self.timeout.silence
        ]
        # Others that fall silent meanwhile are no news: the job can't go on as it is.
        is_news, self.knows_silence = bool(silent) and not self.knows_silence, bool(silent)
        ends_job = bool(silent) and self.timeout.ends_job
        # One of several is enough, but not one that is left to another monitor.
        mine = (peer for number, peer in silent if self.tree.is_first_to_find_silent(number))
        if is_news and (peer := next(mine, None)) is not None:
            why, text = report.host_silent(peer.host, self.timeout)
            event = self.event("host_lost", host=peer.host, reason=why, ends_job=ends_job)
            if ends_job:
                event += self.event("watchdog_abort", reason=why)
            self.print(text, event)
        if ends_job:
            self.end_ranks()
        return ends_job

    def check_calls(self, now: float) -> bool:
        """Report what waits too long; return whether that ended the job."""
        seconds, ends_job = self.timeout.seconds, self.timeout.ends_job
        graph = WaitGraph(rank.read(now) for rank in self.ranks)
        stalled = self.stalled(graph, self.reported_at, seconds, now)
        if not stalled:
            for rank, call in self.stalled(graph, self.warned_at, seconds / 2, now)[:1]:
                self.warned_at = now
                others = self.tree.query("calls", REPLY_SECONDS)()
                graph = graph.extended({}, others.ranks, others.silent)
                self.print(report.warning(graph, rank, call, seconds))
            return False
        replies = self.tree.query("stacks", REPLY_SECONDS)
        stacks, others = self.stacks(), replies()
        graph = graph.extended(stacks, others.ranks, others.silent)
        if ends_job and self.is_exempt(graph, stalled, now):
            return False
        text = report.report(graph, stalled, report.next_step(self.timeout))
        event = self.event("watchdog_abort", reason=report.reason(text)) if ends_job else []
        self.print(text, event)
        self.reported_at = self.warned_at = now
        if ends_job:
            time.sleep(FORWARDING_SECONDS)
            self.end_ranks()
        return ends_job

    def is_exempt(self, graph: WaitGraph, stalled: Waits, now: float) -> bool:
        """Return whether the likeliest culprit does exempt work, for which the others wait."""
        first = next(iter(graph.root_causes(stalled)), None)
        work = first and first.exempt_work
        if not (first and work) or max(call.age for _, call in stalled) > EXEMPT_SECONDS:
            return False
        if (first.world, work.name) not in self.exempted:
            self.exempted.add((first.world, work.name))
            until = f"The ranks go on waiting for it, {EXEMPT_SECONDS:g} s at most."
            self.print(report.report(graph, stalled, until))
        # What they waited for it doesn't count.
        self.pauses.append((now, min(work.age, self.timeout.seconds)))
        return True

    def stalled(self, graph: WaitGraph, known: float, seconds: float, now: float) -> Waits:
        """Return the calls that have waited for ``seconds`` and began after the time ``known``."""
        return [
            (rank, call)
            for rank in graph.ranks.values()
            if rank.state != GONE
            for call in rank.waits
            if now - call.age > known and call.age - self.paused(now - call.age) > seconds
        ]

    def paused(self, start: float) -> float:
        """Return for how long since then nobody can be said to have waited."""
        return sum(length for end, length in self.pauses if end > start)

    def stacks(self) -> dict[int, str]:
        """Return the stacks of the ranks that give some, by their number in MPI.COMM_WORLD."""
        with self.stacks_lock:  # other monitors query too, all at the same time
            if time.monotonic() - self.stacks_at > FRESH_SECONDS:
                self.last_stacks = collect_stacks(self.ranks)
                self.stacks_at = time.monotonic()
            return self.last_stacks

    def event(self, kind: str, **fields: Any) -> list[bytes]:
        """Return an event for `chainermn launch` in the name of the first rank; see `print`."""
        job = self.config["launch"]
        return [event_line(job, self.ranks[0].world, kind, **fields)] if job else []

    def print(self, text: str, event: Sequence[bytes] = ()) -> None:
        print_for(self.ranks, text, event)

    def end_ranks(self) -> None:
        self.ended_job = True
        self.files.scan()
        processes.terminate([rank.process for rank in self.ranks], TERM_SECONDS)

    def clean(self) -> None:
        """Leave nothing of the ranks, which have ended."""
        failed = self.ended_job or not all(rank.read(0.0).has_finished for rank in self.ranks)
        clean(self.files, self.launcher, [rank.process for rank in self.ranks], failed)
        if self.tree.neighbours and failed:
            time.sleep(LINGER_SECONDS)


def supervise(config: dict[str, Any], ranks: list[MonitoredRank]) -> None:
    """Run a monitor in a child process, and another one if it fails, at most ATTEMPTS in all."""
    us = f"{report.PREFIX}the process that watches the ranks on {os.uname().nodename}"
    for _ in range(ATTEMPTS):
        child = os.fork()
        if not child:
            status = 1
            try:
                monitor = Monitor(config, ranks)
                monitor.start_network()
                monitor.run()
                monitor.clean()
                status = 0
            except Exception as error:
                print_for(ranks, f"{us} failed: {type(error).__name__}: {error}\n")
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if not status or all(rank.state() == GONE for rank in ranks):
            return
    lost = "calls that wait too long won't be reported any more"
    print_for(ranks, f"{us} has failed {ATTEMPTS} times: {lost}.\n")


def main() -> None:
    """Watch, as configured on standard input, in a process that is nobody's child."""
    config = json.load(sys.stdin)
    ranks = [MonitoredRank(each) for each in config["ranks"]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a rank may catch it and go on
    if os.fork():
        os._exit(0)
    os.setsid()  # launchers kill a rank's group, whose remains are this process's to remove
    supervise(config, ranks)
