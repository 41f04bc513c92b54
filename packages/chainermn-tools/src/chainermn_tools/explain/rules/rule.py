"""A rule that recognizes one failure, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How much a failure's message says. In this order failures are shown."""

    ROOT_CAUSE = "what went wrong"
    AMBIGUOUS = "what went wrong, with several possible causes"
    WARNING = "a warning; the job goes on"
    SECONDARY = "only says that something else failed"


@dataclass(frozen=True, kw_only=True)
class ErrorRule:
    """A known failure and what to do about it.

    A line of a log means this failure when it holds one of the ``literals`` and matches the
    ``pattern``, if there is one.

    Attributes:
        name: unique; what tests and people call it.
        kind: how much its message says.
        component: the program or library that prints it.
        literals: texts; specific enough that no healthy job prints them. Each is part of
            one line (of which the launcher may have put a rank at the beginning).
        pattern: regular expression that refines the literals; None where they are enough.
        times: number of such lines that it takes.
        examples: real output, as test: some line for every literal, and nothing in it may mean
            another ROOT_CAUSE.
        meaning: what happened, in a sentence or two.
        fix: what to try, first things first; commands where possible.
        source: where the lines come from.
    """

    name: str
    kind: Kind
    component: str
    literals: tuple[str, ...]
    examples: tuple[str, ...]
    meaning: str
    fix: tuple[str, ...]
    source: str
    pattern: re.Pattern[str] | None = None
    times: int = 1
