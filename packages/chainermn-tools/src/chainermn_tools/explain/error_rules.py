"""The rules that recognize known failures: what one holds, and how they are loaded."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from chainermn_tools.explain.verdict import Verdict

# A file for each kind of software, and a table for each rule.
FOLDER = Path(__file__).with_name("rules")


class Kind(Enum):
    """How much a failure's message says. In this order failures are shown."""

    ROOT_CAUSE = "what went wrong"
    AMBIGUOUS = "what went wrong, with several possible causes"
    WARNING = "a warning; the job goes on"
    SECONDARY = "only says that something else failed"


@dataclass(frozen=True, kw_only=True)
class ErrorRule:
    """A known failure and what to do about it.

    A line of a log means this failure when it holds one of the ``literals`` and matches
    the ``pattern``, if there is one.
    """

    name: str  # unique; what tests and people call it
    kind: Kind  # how much its message says
    component: str  # the program or library that prints it
    # Texts, specific enough that no healthy job prints them. Each is part of one line
    # (the launcher may have put a rank at its beginning).
    literals: tuple[str, ...]
    # Real output, as test: some line for every literal, and nothing in it may mean
    # another ROOT_CAUSE.
    examples: tuple[str, ...]
    meaning: str  # what happened, in a sentence or two
    fix: tuple[str, ...]  # what to try, first things first; commands where possible
    source: str  # where the lines come from
    # Refines the literals where they aren't enough.
    pattern: re.Pattern[str] | None = None
    # Number of such lines that it takes, in which the pattern finds the same.
    times: int = 1

    def is_echo_of(self, verdict: Verdict) -> bool:
        """Return whether it only says that a rank failed, and less than the verdict."""
        signals = self.component.endswith("reported by mpiexec")
        is_less = signals and not verdict.how.startswith(("is gone", "ended by signal"))
        return self.kind is Kind.SECONDARY or is_less


@cache
def load_rules(folder: Path = FOLDER) -> tuple[ErrorRule, ...]:
    """Load all rules of a folder; what their files may hold is for a test to say."""
    files = [
        tomllib.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.toml"))
    ]
    return tuple(
        ErrorRule(
            name=name, **{key: _convert(key, value) for key, value in fields.items()}
        )
        for tables in files
        for name, fields in tables.items()
    )


def _convert(field: str, value: Any) -> Any:
    if field == "kind":
        return Kind[value]
    if field == "pattern":
        return re.compile(value)
    return tuple(value) if isinstance(value, list) else value
