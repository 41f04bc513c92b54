"""What to do about a job's failure, by the words in which a launcher or a rank reports it."""

from __future__ import annotations

import _chainermn_verdict

LABEL = "Next step: "
READ_OUTPUT = "read what that rank printed before"
FIND_SENDER = "find who sent it: a time limit, a preemption, or `kill`"
ASK_MPIEXEC = "read mpiexec's own message above; `chainermn doctor` may find the cause"
READ_STACK = "read the stack after 'Fatal Python error'"
START_AGAIN = "start the job again to go on"
# The next step by words in a launcher's text, as in `_chainermn_verdict.STEPS`.
STEPS = (
    ("ended by Ctrl-C", "start it again; it goes on only from a checkpoint"),
    (
        "alone in its MPI",
        "use the mpiexec of mpi4py's MPI; `chainermn doctor` says more",
    ),
    ("these ended without a report", READ_OUTPUT),
    (
        "^ended by signal 9 ",
        "look whether its host ran out of memory: `dmesg -T | grep -iE 'killed|segfault'`",
    ),
    (
        "^ended by signal 1 ",
        "start it by the scheduler, tmux or nohup: its terminal was closed",
    ),
    ("^ended by signal 10 ", FIND_SENDER),
    ("^ended by signal 12 ", FIND_SENDER),
    ("^ended by signal 15 ", FIND_SENDER),
    ("^ended by signal", READ_STACK),
    ("^Fatal Py", READ_STACK),
    ("^exit status", READ_OUTPUT),
    ("^sys.exit(75) (reported", "exit with another number"),
    (
        "^the job did not end",
        "run it again with --env CHAINERMN_TIMEOUT=SECONDS, a smaller number of seconds "
        "than --timeout: a call that waits so long then shows every rank's stack",
    ),
    ("^no rank", "read what was printed above; `chainermn doctor` may find the cause"),
    ("^all ranks ended", ASK_MPIEXEC),
    (
        "^gone",
        "read its last lines; on its host, `dmesg -T | grep -iE 'killed|segfault'`",
    ),
    ("^all ranks have saved", START_AGAIN),
    ("^a signal warned", START_AGAIN),
    *_chainermn_verdict.STEPS,
)


def next_step(how: str, place: str = "") -> str:
    """Return what to do about a failure of a rank, or of a job.

    ``how`` describes the failure, and ``place`` is the line of the user's own code where
    it happened, as `users_lines` returns lines.
    """
    return _chainermn_verdict.next_step(how, place, steps=STEPS)
