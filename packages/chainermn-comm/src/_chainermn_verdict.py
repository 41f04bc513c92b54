"""What to do about a failure, and its traceback: said alike by ranks, watchdog, launch, explain."""

from __future__ import annotations

import os
import re
import sys
import traceback

# How a rank failed, as the words begin that say so, and what to do.
NEXT_STEPS = (
    (
        ".*KeyboardInterrupt|ended by Ctrl-C",
        "nothing is wrong; start the job again to go on",
    ),
    (".*ranks disagree on parameter", "build the same model on all ranks"),
    (
        ".*ranks disagree",
        "look for an `if comm.rank` around that call, or what differs before it",
    ),
    (
        "ended by signal 9 ",
        "see `dmesg -T | grep -i killed` on its host; memory, nearly always",
    ),
    (".*MemoryError", "use fewer ranks or loader processes a host, or a smaller batch"),
    (
        ".*No space left on device",
        "make room: `df -h . /tmp /dev/shm` shows what is full",
    ),
    (
        r"os\._exit",
        "end the rank by sys.exit(), or call mpi4py.MPI.Finalize() before os._exit",
    ),
    (
        r"sys\.exit|exit status|application|ranks? .* goodbye",
        "read what that rank printed before",
    ),
    (
        "ended by signal 1 ",
        "start it by the scheduler, tmux or nohup: its terminal was closed",
    ),
    (
        r"ended by signal (?:10|12|15) ",
        "find who sent it: a time limit, a preemption, or `kill`",
    ),
    (
        "the job did not end",
        "give --timeout more, or look by `chainermn top` what takes the time",
    ),
    (
        "no rank|mpiexec doesn|all ranks said",
        "do what mpiexec says; see `chainermn doctor`",
    ),
    (
        ".*alone in its MPI",
        "take the mpiexec of mpi4py's MPI; `chainermn doctor` says more",
    ),
    (
        "ended by signal|Fatal Py",
        "read the stack after 'Fatal Python error'; see `chainermn env`",
    ),
    (
        "(is )?gone",
        "read its last lines; on its host, `dmesg -T | grep -iE 'oom|segfault'`",
    ),
    (
        "is stopped",
        "`kill -CONT` its process, or ask the scheduler whether it suspended the job",
    ),
    (
        "is in no call",
        "read its stack, the first; if it only takes long, raise CHAINERMN_TIMEOUT",
    ),
    (
        "has ended",
        "look for an `if comm.rank` around a collective call, an early return or sys.exit()",
    ),
    ("waits in", "compare the calls: operation, other rank, tag and communicator"),
    (
        ".*not come to",
        "look at what only it does first: a download, a data set, an import",
    ),
    (
        "nothing was heard|ranks wait for|.*didn't answer",
        "ping that host; then start from the last checkpoint",
    ),
    ("all ranks are in the call", "test the network: `chainermn doctor --hosts ...`"),
    ("all ranks have saved|a signal warned", "start the job again to go on"),
    ("", "fix the error above"),
)
# What stands before these words in the watchdog's reports.
SUBJECT = r"(?:ChainerMN: )?(?:likely culprits?.*?: )?(?:rank \d+ \(.*?\) )?"
# An attribute of errors that follow from another rank's, which prints its own.
FOLLOWS = "_chainermn_follows"
# Frames of what runs a script, of ours, and what may be between these.
NOT_THE_USERS = re.compile(
    r"runpy|contextlib\.py|chainermn_(comm|train|modelparallel|tools|facade)/"
)
# Besides, in stacks: other libraries, and Python's own.
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib\w*/python3|<frozen")
# A frame in a traceback, or in what faulthandler prints.
FRAME = re.compile(r'File "(.+?)", line (\d+)')


def next_step(how: str, place: str = "") -> str:
    """Return what to do about a rank, or a job, that failed so.

    ``place`` is the line of the user's own code in which it did, as `users_lines` has
    it.
    """
    step = next(
        step for words, step in NEXT_STEPS if re.match(f"{SUBJECT}(?:{words})", how)
    )
    if place and step == NEXT_STEPS[-1][1]:
        step += f"; the last line of your own code in it is {place}"
    return f"Next step: {step}."


def users_lines(text: str) -> list[str]:
    """Return the lines of the user's own code, as FILE:LINE, in a traceback or a stack."""
    return [
        f"{os.path.basename(file)}:{line}"
        for file, line in FRAME.findall(text)
        if not NOT_THE_USERS.search(file) and not LIBRARIES.search(file)
    ]


def is_secondary(error: BaseException) -> bool:
    """Return whether the error may only follow from another rank's."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(error, mpi.Exception):
        return True
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return bool(getattr(error, FOLLOWS, "PeerError" in kinds))


def traceback_of(error: BaseException) -> str:
    """Return what Python prints; of what our packages raise on purpose, without their frames."""
    whole = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = whole
    while one is not None:
        users = [
            frame for frame in one.stack if not NOT_THE_USERS.search(frame.filename)
        ]
        if users:
            innermost = one.stack[-1]
            is_on_purpose = (innermost.line or "").startswith("raise ")
            if is_on_purpose or users[-1] is innermost:
                one.stack[:] = users
        one = one.__cause__ or one.__context__
    return "".join(whole.format())
