"""Notices the ends of this machine's ranks in their order, and which of them was a failure.

When one rank dies the launcher kills the others, and may then blame any of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

from .processes import GONE
from .status_region import aborting_since

if TYPE_CHECKING:
    from .monitor import Watched


# For a process whose files are closed to be gone.
GONE_SECONDS = 0.3


class Ends:
    """The ends of ranks.

    Attributes:
        first: the first that ended badly and didn't say why, if nobody had failed before; None
            so far.
    """

    def __init__(self, ranks: list[Watched], news: int) -> None:
        """Wait for these ranks, and for a file that tells of something else; -1 for none."""
        self._ranks = list(ranks)
        self._alive = list(ranks)
        self._news = news
        # It tells of ends in the order in which they came, which select.poll doesn't.
        self._poll = select.epoll()
        self._files: dict[int, Watched] = {}
        self._failed_at: float | None = None
        self.first: Watched | None = None
        if news >= 0:
            self._poll.register(news, select.EPOLLIN)
        for rank in ranks:
            # The kernel closes a process's files, the last opened first, before it is gone. So
            # we hear of it before the launcher does, which kills others that are gone sooner.
            self._files[rank.life] = rank
            # Before Linux 5.3, and on conda's Python, there is none.
            with contextlib.suppress(OSError, AttributeError):
                self._files[os.pidfd_open(rank.pid)] = rank
        for file in self._files:
            self._poll.register(file, select.EPOLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait for an end or for the other file, but not longer; whether the latter came."""
        came = False
        for file, _ in self._poll.poll(seconds):
            if file == self._news:
                came = True
            else:
                self._poll.unregister(file)
                os.close(file)
                self._note(self._files.pop(file))
        for rank in [rank for rank in self._alive if rank.state() == GONE]:
            self._note(rank)
        return came

    def _note(self, rank: Watched) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while rank.state() != GONE:
            if time.monotonic() > deadline:  # it has closed its files, and lives
                return
            time.sleep(0.005)
        if rank in self._alive:
            self._alive.remove(rank)
            now = time.monotonic()
            if self.failed_for(now) is None and not rank.look(now).has_ended:
                self._failed_at, self.first = now, rank

    def failed_for(self, now: float) -> float | None:
        """How long ago a rank first failed: called MPI_Abort, or ended badly; None if none did."""
        times = [since for rank in self._ranks if (since := aborting_since(rank.area)) > 0]
        if self._failed_at is not None:
            times.append(self._failed_at)
        return now - min(times) if times else None
