"""Tracks in which order this machine's ranks exit, and which of them failed first.

When one rank dies the launcher kills the others, and may then blame any of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

from .processes import GONE
from .status_region import read_abort_time

if TYPE_CHECKING:
    from .monitor import MonitoredRank


# Time for a process whose files are closed to be gone.
GONE_SECONDS = 0.3


class ExitTracker:
    """The exits of ranks.

    Attributes:
        first_failure: the first rank to fail, if it died without calling MPI_Abort; None if there
            is none so far.
    """

    def __init__(self, ranks: list[MonitoredRank], wakeup: int) -> None:
        """Wait for these ranks, and for a descriptor that is read elsewhere; -1 for none."""
        self._ranks = list(ranks)
        self._alive = list(ranks)
        self._wakeup = wakeup
        # It reports exits in the order in which they came, which select.poll doesn't.
        self._poll = select.epoll()
        self._files: dict[int, MonitoredRank] = {}
        self._failed_at: float | None = None
        self.first_failure: MonitoredRank | None = None
        if wakeup >= 0:
            self._poll.register(wakeup, select.EPOLLIN)
        for rank in ranks:
            # The kernel closes a process's files, the last opened first, before it is gone. So
            # we hear of it before the launcher does, which kills others that are gone sooner.
            self._files[rank.liveness] = rank
            # Before Linux 5.3, and on conda's Python, there is none.
            with contextlib.suppress(OSError, AttributeError):
                self._files[os.pidfd_open(rank.pid)] = rank
        for file in self._files:
            self._poll.register(file, select.EPOLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for an exit or for ``wakeup``, but not longer; return whether the latter came."""
        came = False
        for file, _ in self._poll.poll(seconds):
            if file == self._wakeup:
                came = True
            else:
                self._poll.unregister(file)
                os.close(file)
                self._record_exit(self._files.pop(file))
        for rank in [rank for rank in self._alive if rank.state() == GONE]:
            self._record_exit(rank)
        return came

    def _record_exit(self, rank: MonitoredRank) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while rank.state() != GONE:
            if time.monotonic() > deadline:  # it has closed its files, and lives
                return
            time.sleep(0.005)
        if rank in self._alive:
            self._alive.remove(rank)
            now = time.monotonic()
            if self.since_failure(now) is None and not rank.look(now).has_finished:
                self._failed_at, self.first_failure = now, rank

    def since_failure(self, now: float) -> float | None:
        """Return for how long a rank has called MPI_Abort or ended badly; None if none has."""
        times = [time for rank in self._ranks if (time := read_abort_time(rank.region)) > 0]
        if self._failed_at is not None:
            times.append(self._failed_at)
        return now - min(times) if times else None
