"""The next step after a failure, and its traceback: equal for ranks, watchdog, launch, explain."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable

# Words of a failure's description, each with the next step. The first row whose words
# occur is used. Words after a caret must occur at the beginning.
STEPS = (
    ("KeyboardInterrupt", "start it again; it goes on only from a checkpoint"),
    ("ranks disagree on parameter", "build the same model on all ranks"),
    (
        "ranks disagree",
        "look for an `if comm.rank` around that call, or what differs before it",
    ),
    ("MemoryError", "use fewer ranks or loader processes a host, or a smaller batch"),
    (
        "No space left on device",
        "make room: `df -h . /tmp /dev/shm` shows what is full",
    ),
    (
        "not come to",
        "look at what only it does first: a download, a data set, an import",
    ),
    (
        "^os._exit",
        "end the rank by sys.exit(), or call mpi4py.MPI.Finalize() before os._exit",
    ),
    ("^sys.exit", "read what that rank printed before"),
    (
        "^is gone",
        "read its last lines; on its host, `dmesg -T | grep -iE 'killed|segfault'`",
    ),
    (
        "^is stopped",
        "`kill -CONT` its process, or ask the scheduler whether it suspended the job",
    ),
    (
        "^is in no call",
        "read its stack, the first one printed: it shows where that rank is; if the rank "
        "is only slow, raise CHAINERMN_TIMEOUT",
    ),
    (
        "^has ended",
        "look for an `if comm.rank` around a collective call, an early return or sys.exit()",
    ),
    ("^waits in", "compare the calls: operation, other rank, tag and communicator"),
    ("^ranks wait for", "ping that host; then start from the last checkpoint"),
    (
        "^all ranks are in the call",
        "test the network: `chainermn doctor --hosts ...`",
    ),
)
# An attribute of errors that follow from another rank's error, which that rank prints.
FOLLOWS = "_chainermn_follows"
# The files of our packages, and Python's own files that may stand between them.
OURS = re.compile(
    r"runpy|contextlib\.py|chainermn_(comm|train|modelparallel|tools|facade)/"
)
# Files of other libraries and of Python.
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib\w*/python3|<frozen")
# A frame in a traceback, or in a stack that faulthandler prints.
FRAME = re.compile(r'File "(.+?)", line (\d+)')


def next_step(
    how: str, place: str = "", *, steps: Iterable[tuple[str, str]] = STEPS
) -> str:
    """Return the next step after a failure of a rank, or of a job.

    ``how`` describes the failure, and ``place`` is the line of the user's own code in
    which it happened, from `users_lines`.
    """
    for words, step in steps:
        if words in f"^{how}":
            return f"Next step: {step}."
    if place:
        place = f"; the last line of your own code in it is {place}"
    return f"Next step: fix the error above{place}."


def users_lines(text: str) -> list[str]:
    """Return the lines of the user's own code, as FILE:LINE, in a traceback or a stack."""
    return [
        f"{os.path.basename(file)}:{line}"
        for file, line in FRAME.findall(text)
        if not OURS.search(file) and not LIBRARIES.search(file)
    ]


def is_secondary(error: BaseException) -> bool:
    """Return whether the error may only follow from another rank's."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(error, mpi.Exception):
        return True
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return bool(getattr(error, FOLLOWS, "PeerError" in kinds))


def traceback_of(error: BaseException) -> str:
    """Return the traceback, without our packages' frames if they raised the error on purpose."""
    parts = traceback.format_exception(error)
    frames = [part for part in parts if FRAME.match(part.strip())]
    others = [frame for frame in frames if not OURS.search(frame.partition("\n")[0])]
    if others and (others[-1] == frames[-1] or "\n    raise " in frames[-1]):
        parts = [part for part in parts if part in others or part not in frames]
    return "".join(parts)
