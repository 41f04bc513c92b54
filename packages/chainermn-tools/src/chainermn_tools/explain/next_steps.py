"""What to do about a job's failure, by the words in which a launcher or a rank reports it."""

from __future__ import annotations

import _chainermn_verdict

READ_LAST_WORDS = "read what that rank printed before"
FIND_SENDER = "find who sent it: a time limit, a preemption, or `kill`"
ASK_MPIEXEC = "do what mpiexec says; see `chainermn doctor`"
READ_STACK = "read the stack after 'Fatal Python error'; see `chainermn env`"
START_AGAIN = "start the job again to go on"
# What to do, by words in what a launcher says, as in `_chainermn_verdict.STEPS`.
STEPS = (
    ("ended by Ctrl-C", f"nothing is wrong; {START_AGAIN}"),
    (
        "alone in its MPI",
        "take the mpiexec of mpi4py's MPI; `chainermn doctor` says more",
    ),
    ("without saying goodbye", READ_LAST_WORDS),
    (
        "^ended by signal 9 ",
        "see `dmesg -T | grep -i killed` on its host; memory, nearly always",
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
    ("^exit status", READ_LAST_WORDS),
    ("^application", READ_LAST_WORDS),
    (
        "^the job did not end",
        "give --timeout more, or look by `chainermn top` what takes the time",
    ),
    ("^no rank", ASK_MPIEXEC),
    ("^mpiexec doesn", ASK_MPIEXEC),
    ("^all ranks said", ASK_MPIEXEC),
    (
        "^gone",
        "read its last lines; on its host, `dmesg -T | grep -iE 'oom|segfault'`",
    ),
    ("^all ranks have saved", START_AGAIN),
    ("^a signal warned", START_AGAIN),
    *_chainermn_verdict.STEPS,
)


def next_step(how: str, place: str = "") -> str:
    """Return what to do about a rank, or a job, that failed so.

    ``place`` is the line of the user's own code in which it did, as `users_lines` has
    it.
    """
    return _chainermn_verdict.next_step(how, place, steps=STEPS)
