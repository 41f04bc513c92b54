"""The ranks of one machine as their monitor sees them: calls, stacks, exits, standard error."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import operator
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from selectors import EVENT_READ, BaseSelector
from typing import Any

from .. import processes
from ..diagnosis import Rank
from ..processes import GONE, RUNNING
from ..report import normalize_stacks
from ..status_region import REGION_BYTES, read_abort_time, read_calls, read_progress

# Time for a rank to write its stacks; without them (it is in the kernel) the report
# goes out, too.
STACKS_SECONDS = 1.5
# Of a rank's stacks, that are read.
STACK_BYTES = 1 << 16
# Total time for printing, over all standard errors that are tried: a stopped launcher
# reads none.
PRINT_SECONDS = 4.0
# Time for a process whose files are closed to be gone.
GONE_SECONDS = 1.0


class MonitoredRank:
    """A rank of this machine."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Map the memory of the rank that ``config`` describes (see `rendezvous`)."""
        self.world, self.pid = config["world"], config["pid"]
        self.signal = config["signal"]
        self.process = (self.pid, config["start_time"])
        # Whose readers stay longer than the rank's.
        launcher = processes.stat(self.pid).parent
        self.launchers = processes.stat(launcher).parent, launcher
        folder = f"/proc/{self.pid}/fd"
        file = os.open(f"{folder}/{config['region']}", os.O_RDONLY)
        self.region = mmap.mmap(file, REGION_BYTES, prot=mmap.PROT_READ)
        os.close(file)
        self.stacks = os.open(f"{folder}/{config['stacks']}", os.O_RDONLY)
        self.liveness = os.open(
            f"{folder}/{config['liveness']}", os.O_RDONLY | os.O_NONBLOCK
        )

    def state(self) -> str:
        return processes.state(self.process)

    def read(self, now: float) -> Rank:
        calls = tuple(read_calls(self.region, now))
        who = self.world, os.uname().nodename, self.pid, self.state()
        return Rank(*who, calls, "", *read_progress(self.region))


def collect_stacks(ranks: Sequence[MonitoredRank]) -> dict[int, str]:
    """Return the stacks of the ranks that give some, by their number in MPI.COMM_WORLD."""
    running = [rank for rank in ranks if rank.state() == RUNNING]
    signalled = [rank for rank in running if processes.catches(rank.pid, rank.signal)]
    starts = sizes = [os.fstat(rank.stacks).st_size for rank in signalled]
    for rank in signalled:
        processes.send_signal(rank.process, rank.signal)
    deadline = time.monotonic() + STACKS_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, sizes = sizes, [os.fstat(rank.stacks).st_size for rank in signalled]
        if sizes == before and all(map(operator.gt, sizes, starts)):
            break
    return {
        rank.world: normalize_stacks(os.pread(rank.stacks, STACK_BYTES, start))
        for rank, start in zip(signalled, starts, strict=True)
    }


def print_for(
    ranks: Sequence[MonitoredRank],
    text: str,
    event: Sequence[bytes] = (),
    held: Sequence[int] = (),
) -> None:
    """Print where it is read: on ``held`` files, or the standard error of a rank or launcher."""
    deadline = time.monotonic() + PRINT_SECONDS
    pids = (*(rank.pid for rank in ranks), *(rank.launchers[1] for rank in ranks))
    for file in itertools.chain(held, stderrs(pids)):
        if processes.write(file, text, (deadline - time.monotonic()) / 2, event):
            return
    processes.write(2, text, deadline - time.monotonic(), event)


def stderrs(pids: Iterable[int]) -> Iterator[int]:
    """Open the standard error of each of these processes, while it is used.

    Not for longer: the launcher waits until no process holds its pipe.
    """
    how = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
    for pid in dict.fromkeys(pids):
        with contextlib.suppress(OSError):  # such as where it is a socket
            file = os.open(f"/proc/{pid}/fd/2", how)
            try:
                yield file
            finally:
                os.close(file)


class ExitTracker:
    """Tracks which rank failed first: the launcher kills the others, and may blame any of them."""

    def __init__(self, ranks: Sequence[MonitoredRank], selector: BaseSelector) -> None:
        """Have the selector call this; by epoll, it does so in the order in which ranks exit."""
        self._ranks, self._selector = ranks, selector
        self._failed_at: float | None = None
        # If it died without calling MPI_Abort.
        self.first_failure: MonitoredRank | None = None
        for rank in ranks:
            # The kernel closes a process's files before it is gone, the last opened
            # first: we hear of it before the launcher does, which kills others that are
            # gone sooner.
            selector.register(
                rank.liveness, EVENT_READ, partial(self._handle_end, rank)
            )

    def _handle_end(self, rank: MonitoredRank) -> None:
        now = time.monotonic()
        self._selector.unregister(rank.liveness)
        os.close(rank.liveness)
        # Else it has closed its files, and lives.
        is_gone = processes.wait_until(
            lambda: rank.state() == GONE, GONE_SECONDS, 0.0005
        )
        if (
            is_gone
            and self.since_failure(now) is None
            and not rank.read(now).has_finished
        ):
            self._failed_at, self.first_failure = now, rank

    def since_failure(self, now: float) -> float | None:
        """Return for how long a rank has called MPI_Abort or ended badly; None if none has."""
        times = [read_abort_time(rank.region) for rank in self._ranks] + [
            self._failed_at or 0.0
        ]
        return now - min(filter(None, times)) if any(times) else None
