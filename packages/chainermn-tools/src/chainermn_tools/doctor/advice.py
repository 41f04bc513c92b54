"""What `chainermn explain` knows of an error's text, as the fix of a check."""

from __future__ import annotations

import io

from chainermn_tools import jobs
from chainermn_tools.explain import Found, Kind, search

MORE_TIME = (
    "something that it looks at hangs, or this machine is slow; if the latter, give it more time "
    "with --timeout"
)


def advice(text: str, otherwise: str) -> str:
    """What to do about an error.

    Args:
        text: what a program printed.
        otherwise: what to do when nothing in it is known.

    Returns:
        The first thing to try about the failure that says most.
    """
    found = _most_telling(text)
    return otherwise if found is None else found.known.fix[0]


def about(problem: jobs.Unavailable, otherwise: str) -> str:
    """What to do where a probe had no answer.

    Args:
        problem: that it raised.
        otherwise: what to do when nothing in it is known.
    """
    return MORE_TIME if isinstance(problem, jobs.TimedOut) else advice(str(problem), otherwise)


def telling_line(text: str) -> str:
    """The line of an error that says most; "nothing" if none does."""
    found = _most_telling(text)
    return found.text if found is not None else last_line(text) or "nothing"


def last_line(text: str) -> str:
    """The last line that says something; empty if none does."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if set(line) - set("-=*#")), "")


def _most_telling(text: str) -> Found | None:
    for found in search(io.BytesIO(text.encode(errors="replace"))):
        if found.known.kind in (Kind.CAUSE, Kind.GENERAL):
            return found
    return None
