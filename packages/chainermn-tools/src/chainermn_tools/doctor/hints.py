"""Hints that several checks give: the remedy that `chainermn explain` knows, or more time."""

from __future__ import annotations

import re

from chainermn_tools.explain import root_cause

MORE_TIME = (
    "it hangs, or this machine is slow; if it is slow, give more time with --timeout"
)
REPORT_IT = "please report it: chainermn doctor --report"
# The ends of the reasons that `jobs.TimedOut` and `environment.run_concurrently` give.
TIMED_OUT = re.compile(r"within \S+ s$")


def hint_for(text: str, default: str) -> str:
    """Return the first thing to try about an error: its cause's known remedy, or the default."""
    if TIMED_OUT.search(text):
        return MORE_TIME
    match = root_cause(text.encode(errors="replace"))
    return default if match is None else match.rule.fix[0]


def most_telling_line(text: str) -> str:
    """Return the most telling line of an error, or else the last line; "nothing" without any."""
    if match := root_cause(text.encode(errors="replace")):
        return match.text
    lines = [line.strip() for line in text.splitlines()]
    return next(
        (line for line in reversed(lines) if set(line) - set("-=*#")), "nothing"
    )
