"""The process that watches the ranks of one machine; it needs none of them to answer."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..events import event_frames
from . import processes
from .cleanup import SharedFiles, clean
from .diagnosis import Job, Rank, from_answer
from .exit_tracker import Ends
from .launcher import Launcher
from .network import Asking, Peer, keep_asking, serve
from .processes import GONE, RUNNING
from .report import (
    cut_off,
    last_words,
    no_answer,
    plain,
    reason,
    report,
    silent,
    state,
    warning,
    whereabouts,
)
from .status_region import AREA_BYTES, Call, aborting_since, doing, read

# Often enough for a report to come in time, seldom enough to take nothing from the ranks.
TICK_SECONDS = 0.5
# For a rank to write its stacks; where it can't, such as in the kernel, the report goes without.
STACKS_SECONDS = 1.5
# For so long nobody is asked again.
FRESH_SECONDS = 2.0
# For somebody to take what is said, of all who are tried: a launcher that is stopped reads nothing.
SAYING_SECONDS = 4.0
# Between the report and the end, for the launcher to forward it.
FORWARDING_SECONDS = 0.5
# From SIGTERM to SIGKILL.
TERM_SECONDS = 1.0
# For the monitors of other machines, which may have to ask for stacks.
ANSWER_SECONDS = 2.2
# For them to say whether a rank of theirs has failed; and for this one to be asked that.
FAILED_SECONDS, LINGER_SECONDS = 1.0, 1.5
# Between two looks whether the next machine is there.
BEAT_SECONDS = 1.0
# A monitor that comes so late was stopped, and the job with it (or the machine is very busy).
PAUSE_SECONDS = 2.0
# From MPI_Abort, which can't cross a cut link, to our own end of the ranks.
ABORT_SECONDS = 3.0
# For so long a call may wait for a rank that said that it works alone, whatever the time-out.
ALONE_SECONDS = 600.0


class Watched:
    """A rank of this machine, as the monitor sees it."""

    def __init__(self, orders: dict[str, Any]) -> None:
        """Map the memory of the rank that the orders describe (see `starting`)."""
        self.world, self.pid = orders["world"], orders["pid"]
        self.birth, self.signal = orders["birth"], orders["signal"]
        self.process = (self.pid, self.birth)
        folder = f"/proc/{self.pid}/fd"
        file = os.open(f"{folder}/{orders['area']}", os.O_RDONLY)
        self.area = mmap.mmap(file, AREA_BYTES, prot=mmap.PROT_READ)
        os.close(file)
        self.stacks = os.open(f"{folder}/{orders['stacks']}", os.O_RDONLY)
        self.life = os.open(f"{folder}/{orders['life']}", os.O_RDONLY | os.O_NONBLOCK)

    def state(self) -> str:
        return processes.state(self.pid, self.birth)

    def look(self, now: float) -> Rank:
        return Rank(
            self.world,
            os.uname().nodename,
            self.pid,
            self.state(),
            tuple(read(self.area, now)),
            doing=doing(self.area, now),
        )

    def has_aborted(self, now: float) -> bool:
        since = aborting_since(self.area)
        return since > 0 and now - since > ABORT_SECONDS


class Monitor:
    """Watches until the ranks have ended, or ends them."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.ranks = [Watched(each) for each in orders["ranks"]]
        self.files = SharedFiles([rank.process for rank in self.ranks])
        self.launcher = Launcher(self.ranks[0].pid)
        self.seconds: float = orders["seconds"]
        self.ends_job: bool = orders["ends_job"]
        self.silence: float = orders["silence"]
        self.tick = min(TICK_SECONDS, self.seconds / 10)
        # When calls began that have been reported, or warned of, by rank and communicator.
        self.reported: dict[Any, float] = {}
        self.warned: dict[Any, float] = {}
        # Works that ranks said to do alone and that have been reported.
        self.excused: set[tuple[int, str]] = set()
        # When this process stood still, and the ranks with it, and for how long.
        self.pauses: list[tuple[float, float]] = []
        self.others = [Peer(where) for where in orders["others"]]
        # When the next machine was heard last before it was said to be silent.
        self.told_silence: float | None = None
        self.orders = orders
        self.asking = threading.Lock()
        self.last_stacks: dict[int, str] = {}
        self.stacks_at = -FRESH_SECONDS
        self.ends = Ends(self.ranks, self.files.news)
        # Those that started the ranks, who may hear of the end of the last one.
        self.launchers = {processes.parent(rank.pid) for rank in self.ranks}

    def meet(self) -> None:
        """Begin to answer the monitors of other machines, and to listen to the next one's heart.

        The next in a ring, so that it takes no more than a connection a machine. Whichever link
        is cut, a machine on either side notices.
        """
        if self.orders["listener"] is not None:
            listener = socket.socket(fileno=self.orders["listener"])
            secret = self.orders["mine"]["secret"]
            self.begin(serve, listener, secret, self.answer)
        if self.others:
            self.begin(keep_asking, self.others[0], BEAT_SECONDS)

    def begin(self, work: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def answer(self, question: str) -> dict[str, Any]:
        """What another monitor asked for: a sign of life, what ranks do, or their stacks too."""
        stacks = self.stacks() if question == "stacks" else {}
        now = time.monotonic()
        ranks = [rank.look(now) for rank in self.ranks]
        if question == "failed":
            return {"failed": self.ends.failed_for(now)}
        if question == "alive":
            return {"ended": all(rank.has_ended for rank in ranks)}
        return {
            "ranks": [asdict(replace(rank, stacks=stacks.get(rank.world, ""))) for rank in ranks]
        }

    def run(self) -> None:
        while True:
            before = time.monotonic()
            files_were_made = self.ends.wait(self.tick)
            now = time.monotonic()
            if now - before > self.tick + PAUSE_SECONDS:
                self.pauses.append((now, now - before))
            self.tell_of_first()
            if files_were_made:
                self.files.look_at_news()
            alive = [rank for rank in self.ranks if rank.state() != GONE]
            if not alive:
                return
            if any(rank.has_aborted(now) for rank in self.ranks):
                self.end()
                return
            if self.look_at_next(now) or self.look(now):
                return

    def tell_of_first(self) -> None:
        """Say which rank ended badly and said nothing, before all others."""
        rank, self.ends.first = self.ends.first, None
        if rank is None:
            return
        others = Asking(self.others, "failed", FAILED_SECONDS)
        ages = [answer["failed"] or 0.0 for answer in others.answers()]
        now = time.monotonic()
        own = self.ends.failed_for(now) or 0.0
        # Of a machine where all is over the launcher has heard before this one.
        is_over = len(ages) < len(self.others) and any(other.has_ended for other in self.others)
        if not is_over and all(age <= own for age in ages):
            lost = rank.look(now)
            job = Job([lost])
            how = state(job, lost).removeprefix("is ")
            event = self.event("rank_lost", lost=lost.world, pid=lost.pid, host=lost.host, how=how)
            self.say(f"ChainerMN: {whereabouts(job, lost)}.\n", event)

    def look_at_next(self, now: float) -> bool:
        """Report the next machine where it is silent; whether that was the end of the job."""
        if not self.others or not self.is_lost(self.others[0], now):
            return False
        host = self.others[0].host
        why = no_answer(host, self.silence)
        event = self.event("host_lost", host=host, reason=why, ends_job=self.ends_job)
        if not self.ends_job:
            if self.told_silence != self.others[0].heard:  # else it wasn't heard again
                self.told_silence = self.others[0].heard
                self.say(silent(host, self.silence, self.seconds), event)
            return False
        self.say(cut_off(host, self.silence), event + self.event("watchdog_abort", reason=why))
        self.end()
        return True

    def is_lost(self, other: Peer, now: float) -> bool:
        """Whether a machine that could be heard has been silent for too long."""
        if other.heard is None or other.has_ended:
            return False
        return now - other.heard - self.paused(other.heard) > self.silence

    def look(self, now: float) -> bool:
        """Report what waits too long; whether that was the end of the job."""
        job = Job(rank.look(now) for rank in self.ranks)
        waiting = [
            (rank, call) for rank in job.ranks.values() if rank.state != GONE for call in rank.waits
        ]
        stalled = self.news(waiting, self.reported, self.seconds, now)
        if not stalled:
            for rank, call in self.news(waiting, self.warned, self.seconds / 2, now)[:1]:
                self.remember(waiting, self.warned, now)
                others = Asking(self.others, "calls", ANSWER_SECONDS)
                self.say(warning(self.joined(job, others), rank, call, self.seconds))
            return False
        others = Asking(self.others, "stacks", ANSWER_SECONDS)
        job = self.joined(job.with_stacks(self.stacks()), others)
        if self.ends_job and self.is_excused(job, stalled, now):
            return False
        text = report(job, stalled, last_words(self.seconds, self.ends_job))
        event = self.event("watchdog_abort", reason=reason(text)) if self.ends_job else []
        self.say(text, event)
        self.remember(waiting, self.reported, now)
        self.remember(waiting, self.warned, now)
        if self.ends_job:
            time.sleep(FORWARDING_SECONDS)
            self.end()
        return self.ends_job

    def is_excused(self, job: Job, stalled: list[tuple[Rank, Call]], now: float) -> bool:
        """Whether the first to blame works alone, for which the others have to wait."""
        first = next(iter(job.suspects(stalled)), None)
        longest = max(call.age for _, call in stalled)
        if first is None or not first.works_alone or longest > ALONE_SECONDS:
            return False
        assert first.doing is not None
        work = first.world, first.doing.what
        if work not in self.excused:
            self.excused.add(work)
            until = f"The ranks go on waiting for it, {ALONE_SECONDS:g} s at most."
            self.say(report(job, stalled, until))
        # What they waited for it doesn't count.
        self.pauses.append((now, min(first.doing.age, self.seconds)))
        return True

    def joined(self, job: Job, others: Asking) -> Job:
        """The ranks of this machine, and those of others that answer."""
        found = [rank for answer in others.answers() for rank in from_answer(answer)]
        return Job([*job.ranks.values(), *found], others.silent())

    def news(
        self,
        waiting: list[tuple[Rank, Call]],
        known: dict[Any, float],
        seconds: float,
        now: float,
    ) -> list[tuple[Rank, Call]]:
        """The calls that wait for so long and aren't known yet."""
        return [
            (rank, call)
            for rank, call in waiting
            if call.age - self.paused(now - call.age) > seconds
            and abs(known.get(_key(rank, call), -1.0) - (now - call.age)) > 1e-3
        ]

    def paused(self, start: float) -> float:
        """How long since then nobody can be said to have waited."""
        return sum(length for end, length in self.pauses if end > start)

    def remember(
        self, waiting: list[tuple[Rank, Call]], known: dict[Any, float], now: float
    ) -> None:
        known.clear()
        known.update({_key(rank, call): now - call.age for rank, call in waiting})

    def stacks(self) -> dict[int, str]:
        """Ask the ranks for their stacks; those that give some, by their number."""
        with self.asking:  # other monitors ask too, all at the same time
            if time.monotonic() - self.stacks_at > FRESH_SECONDS:
                self.last_stacks = self._stacks()
                self.stacks_at = time.monotonic()
            return self.last_stacks

    def _stacks(self) -> dict[int, str]:
        asked: dict[int, tuple[Watched, int]] = {}
        for rank in self.ranks:
            if rank.state() == RUNNING and processes.catches(rank.pid, rank.signal):
                asked[rank.world] = rank, os.fstat(rank.stacks).st_size
                processes.send(rank.pid, rank.birth, rank.signal)
        deadline = time.monotonic() + STACKS_SECONDS
        sizes: list[int] = []
        while time.monotonic() < deadline:
            time.sleep(0.1)
            before = sizes
            sizes = [os.fstat(rank.stacks).st_size for rank, _ in asked.values()]
            starts = [start for _, start in asked.values()]
            if sizes == before and all(a > b for a, b in zip(sizes, starts, strict=True)):
                break
        return {
            world: plain(os.pread(rank.stacks, 1 << 20, start))
            for world, (rank, start) in asked.items()
        }

    def event(self, kind: str, **fields: Any) -> list[bytes]:
        """An event for `chainermn launch`, in the name of this machine's first rank; see `say`."""
        job = self.orders["launch"]
        return event_frames(job, self.ranks[0].world, kind, **fields) if job else []

    def say(self, text: str, event: Sequence[bytes] = ()) -> None:
        """Print on the standard error of a rank, the first whose launcher reads it."""
        deadline = time.monotonic() + SAYING_SECONDS
        for pid in (*(rank.pid for rank in self.ranks), *self.launchers):
            if processes.write_stderr(pid, text, (deadline - time.monotonic()) / 2, event):
                return
        processes.write(2, text, deadline - time.monotonic())

    def end(self) -> None:
        self.files.look()
        processes.end([rank.process for rank in self.ranks], TERM_SECONDS)

    def clean(self) -> None:
        """Leave nothing of the ranks, which have ended."""
        failed = not all(rank.look(0.0).has_ended for rank in self.ranks)
        clean(self.files, self.launcher, [rank.process for rank in self.ranks], failed)
        if self.others and failed:
            time.sleep(LINGER_SECONDS)


def _key(rank: Rank, call: Call) -> tuple[Any, ...]:
    return rank.world, call.communicator, call.operation


def main() -> None:
    """Watch, as ordered on standard input, in a process that is nobody's child."""
    monitor = Monitor(json.load(sys.stdin))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a rank may catch it and go on
    if os.fork():
        os._exit(0)
    os.setsid()  # launchers kill a rank's group, whose remains are this process's to remove
    monitor.meet()
    monitor.run()
    monitor.clean()
