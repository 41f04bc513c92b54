"""Where a monitor prints: it has no terminal of its own, and its ranks may be gone."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence

from .. import processes
from .local_ranks import MonitoredRank

# Total time for printing, over all standard errors that are tried: a stopped launcher
# reads none.
PRINT_SECONDS = 4.0


def print_for(
    ranks: Sequence[MonitoredRank],
    text: str,
    events: Sequence[bytes] = (),
    held: Sequence[int] = (),
) -> None:
    """Print where it is read: on ``held`` files, or the standard error of a rank or launcher."""
    deadline = time.monotonic() + PRINT_SECONDS
    pids = [rank.pid for rank in ranks] + [rank.launcher for rank in ranks]
    for file in itertools.chain(held, standard_errors(pids)):
        if processes.write(file, text, (deadline - time.monotonic()) / 2, events):
            return
    processes.write(2, text, deadline - time.monotonic(), events)


@contextlib.contextmanager
def held_launchers(rank: MonitoredRank) -> Iterator[list[int]]:
    """Give the standard errors of a rank's launcher and of its parent, which wait meanwhile.

    Files come last: mpiexec would write over what is printed there.
    """
    parent = processes.stat(rank.launcher).parent
    held = [os.dup(file) for file in standard_errors([parent, rank.launcher])]
    try:
        yield sorted(held, key=lambda file: stat.S_ISREG(os.fstat(file).st_mode))
    finally:
        for file in held:
            os.close(file)


def standard_errors(pids: Iterable[int]) -> Iterator[int]:
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
