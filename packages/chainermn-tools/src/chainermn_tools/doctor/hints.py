"""Hints that several checks give: what `chainermn explain` knows of an error, or more time."""

from __future__ import annotations

from chainermn_tools.explain import root_cause
from chainermn_tools.jobs import TimedOut, Unavailable

MORE_TIME = (
    "something that it looks at hangs, or this machine is slow; if the latter, give it more time "
    "with --timeout"
)
REPORT_IT = "please report it: chainermn doctor --report"
LIST_MPI_VARIABLES = "env | grep -E '^(UCX|FI|OMPI|MPICH|MV2)_'"


def hint_for_output(text: str, default: str) -> str:
    """Return the first thing to try about the root cause in what a program printed, if known."""
    match = root_cause(text.encode(errors="replace"))
    return default if match is None else match.rule.fix[0]


def hint_for_error(error: Unavailable, default: str) -> str:
    return (
        MORE_TIME
        if isinstance(error, TimedOut)
        else hint_for_output(str(error), default)
    )


def most_telling_line(text: str) -> str:
    """Return the line of an error that says most, or the last one; "nothing" if none does."""
    if match := root_cause(text.encode(errors="replace")):
        return match.text
    lines = [line.strip() for line in text.splitlines()]
    return next(
        (line for line in reversed(lines) if set(line) - set("-=*#")), "nothing"
    )
