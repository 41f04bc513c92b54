"""The loop of a monitor, which reads its machine's ranks again and again, and may end them.

The first machine's monitor decides for all machines (`judge`). The monitors of other
machines push their ranks' records to the first machine's monitor once a call waits or a
rank has failed (`follow`). The first machine's monitor also asks for them when it is
about to report (`collect`).
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from _chainermn_events import MOST_CHARACTERS, event_line
from _chainermn_verdict import next_step

from .. import processes, report
from ..diagnosis import Rank, WaitGraph, Waits, longest_wait, waits_of
from ..processes import GONE
from .cleanup import WAIT_SECONDS, SharedFiles
from .first_machine import FirstMachine
from .judge import Judge
from .link import Message
from .local_ranks import LocalRanks
from .other_machines import OtherMachines
from .printing import print_for

# The time between two looks at the ranks: short enough for a report in time, and long
# enough to cost the ranks nothing.
TICK_SECONDS = 0.5
# Time for the first rank, which has just started this process, to introduce itself.
COME_SECONDS = 30.0
# How long monitors of other machines may take to push records, with stacks if asked.
PUSH_SECONDS = 2.5
# Between two pushes of a machine on which a call waits.
REPEAT_SECONDS = 1.0
# Time for the first machine to report; then a machine that is cut off ends its ranks.
CUT_OFF_SECONDS = 8.0
# If a monitor wakes up this much too late, it was stopped together with the job (or the
# machine is very busy).
PAUSE_SECONDS = 2.0
# Time for the launcher to forward the report before the end; between SIGTERM and
# SIGKILL.
FORWARDING_SECONDS = 0.5
TERM_SECONDS = 1.0
# Time between MPI_Abort, which can't cross a cut link, and our own end of the ranks.
ABORT_SECONDS = 3.0


class Monitor:
    """Watches the ranks of a machine until they have ended, or ends them."""

    def __init__(self, listener: socket.socket) -> None:
        self.selector = selectors.DefaultSelector()
        self.local = LocalRanks(listener, self.selector, self.handle_local)
        self.files = SharedFiles()
        # The first of several machines has `others`; each other machine has a `first`.
        self.other_machines = OtherMachines(self.selector)
        self.first_machine: FirstMachine | None = None
        self.judge = Judge(self)
        self.push_at = -math.inf  # from then on, records may be pushed again
        self.asked = 0  # number of questions to the other machines
        self.must_end = False

    def look(self) -> bool:
        """Look at the ranks once, after a tick or a message; return whether to go on."""
        began = time.monotonic()
        self.handle_messages(TICK_SECONDS)
        now = time.monotonic()
        if now - began > TICK_SECONDS + PAUSE_SECONDS:
            self.local.awake_since = now
        ranks = self.local.read(now)
        known = ranks + self.other_machines.ranks()
        self.files.scan_if_due([rank.pid for rank in ranks], now)
        if any(rank.has_failed for rank in ranks):
            self.files.scan()  # some ranks may still live, and map files
        if self.first_machine is None:
            self.judge.report_failure(known, now)
            self.judge.report_calls(known, now)
        else:
            self.follow(self.first_machine, ranks, now)
        # MPI_Abort may hang.
        if self.must_end or any(
            rank.has_aborted and rank.failed_at < now - ABORT_SECONDS for rank in known
        ):
            self.end_ranks()
            return False
        if not ranks:
            return now < self.local.awake_since + COME_SECONDS
        return any(rank.state != GONE for rank in ranks)

    def handle_messages(self, seconds: float) -> None:
        """Handle messages of ranks and monitors; wait for the first at most this long."""
        for key, _ in self.selector.select(seconds):
            key.data()

    def handle_local(self, message: Message, files: list[int]) -> object:
        """Answer a question, or take the description of the first of several machines."""
        if message["kind"] == "ask":
            graph = self.collect(time.monotonic(), message["what"] == "stacks")
            ranks = [asdict(rank) for rank in graph.ranks.values()]
            return {"ranks": ranks, "unseen": graph.unreachable}
        silence = self.local.timeout.silence
        if message["kind"] == "first machine":
            self.other_machines.listen(files[0], message, silence)
        elif self.first_machine is None:
            self.first_machine = FirstMachine(
                self.selector, message, silence, self.handle_first_machine
            )
        self.local.members.clear()  # ranks of other machines are known now
        return None

    def collect(self, now: float, with_stacks: bool = False) -> WaitGraph:
        """Return the records of all machines' ranks, if their monitors answer in time."""
        machines = self.other_machines
        self.asked += 1
        machines.send("push", number=self.asked, with_stacks=with_stacks)
        ranks = self.local.read(now, with_stacks)
        left = PUSH_SECONDS
        while left > 0 and any(
            machine.answered < self.asked for machine in machines.linked
        ):
            self.handle_messages(left)
            left = now + PUSH_SECONDS - time.monotonic()
        unreachable = []
        for machine in machines.known:
            if machine.answered == self.asked:
                ranks += machine.ranks
            else:  # the machine's monitor may have ended with the ranks
                ranks += [rank for rank in machine.ranks if rank.has_failed]
                unreachable.append(machine.name)
        if self.first_machine is not None:
            unreachable.append(self.first_machine.name)
        return WaitGraph(ranks, unreachable, self.local.members)

    # This machine isn't the first.

    def follow(
        self, first_machine: FirstMachine, ranks: list[Rank], now: float
    ) -> None:
        """Push records if a rank has failed or a call waits; end ranks that are cut off."""
        first_machine.connect_if_due(now)
        timeout = self.local.timeout
        longest = longest_wait(ranks)
        if first_machine.is_linked:
            patience = min(timeout.seconds / 2, timeout.silence)
            is_due = 0 < patience < longest and now > self.push_at
            # After a failure this monitor may end soon, like its ranks.
            if is_due or any(rank.has_failed for rank in ranks):
                self.push(ranks)
        elif timeout.ends_job and longest > timeout.seconds + CUT_OFF_SECONDS:
            graph = WaitGraph(ranks, [first_machine.name])
            self.report(graph, waits_of(ranks, timeout.seconds))

    def handle_first_machine(self, message: Message) -> None:
        """End the ranks, or push their records, as the first machine's monitor says."""
        if message["kind"] == "end":
            self.must_end = True
        else:
            with_stacks = message["with_stacks"]
            ranks = self.local.read(time.monotonic(), with_stacks)
            self.push(ranks, message["number"])
            if with_stacks:  # which the first machine keeps for so long
                self.push_at += PUSH_SECONDS

    def push(self, ranks: list[Rank], number: int = 0) -> None:
        """Send the first machine the ranks' records, in answer to the question of this number."""
        assert self.first_machine is not None
        self.push_at = time.monotonic() + REPEAT_SECONDS
        self.first_machine.send(
            "records",
            ranks=[asdict(rank) for rank in ranks],
            number=number,
            sent_at=time.monotonic(),
        )

    # Reports, and the end.

    def report(self, graph: WaitGraph, stalled: Waits) -> None:
        """Report calls, which ends the job if the user has set the time-out."""
        timeout = self.local.timeout
        said = report.report(graph, stalled, timeout)
        text = said.text
        event = b""
        if timeout.ends_job:
            self.must_end = True
            event = self.event(
                "watchdog_abort",
                reason=said.reason[:MOST_CHARACTERS],
                how=said.how[:MOST_CHARACTERS],
            )
        if not event:  # otherwise the launcher says what to do next
            text += f"{next_step(said.how)}\n"
        self.print(text, event)

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return an event in the name of the first rank, if `chainermn launch` started the job."""
        launch = self.local.launch
        if launch is None:
            return b""
        return event_line(launch, self.local.ranks[0].world, kind, **fields)

    def print(self, text: str, event: bytes = b"", first: Sequence[int] = ()) -> None:
        """Print on the standard error of these processes, or of a rank or a launcher."""
        ranks = [rank.pid for rank in self.local.ranks]
        launchers = [rank.launcher for rank in self.local.ranks]
        print_for([*first, *ranks, *launchers], text, event)

    def end_ranks(self) -> None:
        """End all ranks of the job that can be reached."""
        self.must_end = True
        self.files.scan()
        time.sleep(FORWARDING_SECONDS)
        self.other_machines.send("end")
        ranks = self.local.read(time.monotonic())
        living = [rank.pid for rank in ranks if rank.state != GONE]
        processes.terminate(living, TERM_SECONDS)

    def clean(self) -> None:
        """Remove everything of ended ranks, except children after a good end."""
        ranks = self.local.read(time.monotonic())
        has_failed = self.must_end or not all(rank.has_finished for rank in ranks)
        if has_failed:
            processes.end_children([rank.pid for rank in self.local.ranks])
        processes.wait_until(self.files.remove, WAIT_SECONDS)
        if has_failed and self.local.ranks:
            processes.end_daemon(self.local.ranks[0].launcher)
