"""What to do about a job's failure, by the words in which a launcher or a rank reports it."""

from __future__ import annotations

import _chainermn_verdict

# What to do, by words that are somewhere in what a launcher says, ...
BY_CONTENTS = (
    ("ended by Ctrl-C", "nothing is wrong; start the job again to go on"),
    (
        "alone in its MPI",
        "take the mpiexec of mpi4py's MPI; `chainermn doctor` says more",
    ),
    ("without saying goodbye", "read what that rank printed before"),
)
# ... and else by the words with which it begins.
BY_BEGINNING = (
    (
        ("ended by signal 9 ",),
        "see `dmesg -T | grep -i killed` on its host; memory, nearly always",
    ),
    (
        ("ended by signal 1 ",),
        "start it by the scheduler, tmux or nohup: its terminal was closed",
    ),
    (
        ("ended by signal 10 ", "ended by signal 12 ", "ended by signal 15 "),
        "find who sent it: a time limit, a preemption, or `kill`",
    ),
    (
        ("ended by signal", "Fatal Py"),
        "read the stack after 'Fatal Python error'; see `chainermn env`",
    ),
    (("exit status", "application"), "read what that rank printed before"),
    (
        ("the job did not end",),
        "give --timeout more, or look by `chainermn top` what takes the time",
    ),
    (
        ("no rank", "mpiexec doesn", "all ranks said"),
        "do what mpiexec says; see `chainermn doctor`",
    ),
    (
        ("gone",),
        "read its last lines; on its host, `dmesg -T | grep -iE 'oom|segfault'`",
    ),
    (
        ("all ranks have saved", "a signal warned"),
        "start the job again to go on",
    ),
)


def next_step(how: str, place: str = "") -> str:
    """Return what to do about a rank, or a job, that failed so.

    ``place`` is the line of the user's own code in which it did, as `users_lines` has
    it.
    """
    for words, step in BY_CONTENTS:
        if words in how:
            return f"Next step: {step}."
    for beginnings, step in BY_BEGINNING:
        if how.startswith(beginnings):
            return f"Next step: {step}."
    return _chainermn_verdict.next_step(how, place)
