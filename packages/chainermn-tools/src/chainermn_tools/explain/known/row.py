"""What is known of one failure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How much a failure's message says. In this order failures are shown."""

    CAUSE = "what went wrong"
    GENERAL = "what went wrong, with several possible causes"
    WARNING = "a warning; the job goes on"
    ECHO = "only says that something else failed"


@dataclass(frozen=True, kw_only=True)
class Known:
    """One known failure and what to do about it.

    A line of a log means this failure when it holds one of the ``signs`` and matches the
    ``pattern``, if there is one.

    Attributes:
        name: unique; what tests and people call it.
        kind: how much its message says.
        component: the program or library that prints it.
        signs: literal texts; specific enough that no healthy job prints them. Each is part of
            one line (of which the launcher may have put a rank at the beginning).
        pattern: regular expression that refines the signs; None where they are enough.
        times: number of such lines that it takes.
        lines: real output, as test: some line for every sign, and nothing in it may mean another
            CAUSE.
        meaning: what happened, in a sentence or two.
        fix: what to try, first things first; commands where possible.
        source: where the lines come from.
    """

    name: str
    kind: Kind
    component: str
    signs: tuple[str, ...]
    lines: tuple[str, ...]
    meaning: str
    fix: tuple[str, ...]
    source: str
    pattern: re.Pattern[str] | None = None
    times: int = 1
