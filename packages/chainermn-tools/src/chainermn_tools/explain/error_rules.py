"""The rules that recognize known errors, and how they are loaded."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

# A file for each kind of software, and a table for each rule.
FOLDER = Path(__file__).with_name("rules")


class Kind(Enum):
    """How much an error's message says. Errors are shown in this order."""

    ROOT_CAUSE = "what went wrong"
    AMBIGUOUS = "what went wrong, with several possible causes"
    SIGNAL = "how a rank ended"
    WARNING = "a warning; the job goes on"
    SECONDARY = "only says that something else failed"


@dataclass(frozen=True, kw_only=True)
class ErrorRule:
    """A known error and what to do about it.

    A line of a log means this error if it contains one of the ``literals`` and matches
    the ``pattern``.
    """

    name: str  # unique; the name of its table
    component: str  # the software that prints the message; the name of the rule's file
    kind: Kind  # how much the message says
    # Texts, specific enough that no healthy job prints them. Each is part of one line,
    # which may begin with a rank.
    literals: tuple[str, ...]
    # Refines the literals if they aren't enough. A group `host` is the name of a host,
    # which replaces HOST in `fix`.
    pattern: re.Pattern[str]
    # Real output, for the tests: a line for every literal, and no line that means
    # another ROOT_CAUSE.
    examples: tuple[str, ...]
    meaning: str  # the failure, in a sentence or two
    fix: tuple[str, ...]  # what to try, in this order; commands if possible

    def is_possible(self, text: str) -> bool:
        """Return whether any line of a text may mean this error."""
        return any(literal in text for literal in self.literals)

    def find(self, line: str) -> re.Match[str] | None:
        """Return where in a line the message is; None if the line doesn't mean this error."""
        if not self.is_possible(line):
            return None
        return self.pattern.search(line)


@cache
def load_rules(folder: Path = FOLDER) -> tuple[ErrorRule, ...]:
    """Load all rules of a folder. A test checks what their files contain."""
    rules: list[ErrorRule] = []
    for file in sorted(folder.glob("*.toml")):
        rules += _rules_of(file)
    return tuple(rules)


def _rules_of(file: Path) -> Iterator[ErrorRule]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(file.read_text("utf-8"))
    for name, table in tables.items():
        literals = table["literals"]
        pattern = table.get("pattern", "|".join(map(re.escape, literals)))
        yield ErrorRule(
            name=name,
            component=file.stem,
            kind=Kind[table["kind"]],
            literals=tuple(literals),
            pattern=re.compile(pattern),
            examples=tuple(table["examples"]),
            meaning=table["meaning"],
            fix=tuple(table["fix"]),
        )
