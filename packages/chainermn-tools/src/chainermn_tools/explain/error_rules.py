"""The rules that recognize known failures: what one holds, and how they are loaded."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

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

    A line of a log means this failure when it holds one of the ``literals`` and matches the
    ``pattern``, if there is one.
    """

    name: str  # unique; what tests and people call it
    kind: Kind  # how much its message says
    component: str  # the program or library that prints it
    # Texts, specific enough that no healthy job prints them. Each is part of one line (the
    # launcher may have put a rank at its beginning).
    literals: tuple[str, ...]
    # Real output, as test: some line for every literal, and nothing in it may mean another
    # ROOT_CAUSE.
    examples: tuple[str, ...]
    meaning: str  # what happened, in a sentence or two
    fix: tuple[str, ...]  # what to try, first things first; commands where possible
    source: str  # where the lines come from
    pattern: re.Pattern[str] | None = None  # refines the literals where they aren't enough
    times: int = 1  # number of such lines that it takes, in which the pattern finds the same


# What a field must be in a file, by its type in a rule.
EXPECTED: dict[Any, str] = {
    Kind: f"one of {', '.join(Kind.__members__)}",
    str: "a text",
    tuple[str, ...]: "a list of texts",
    re.Pattern[str] | None: "a regular expression",
    int: "a positive integer",
}
FIELDS = {name: kind for name, kind in get_type_hints(ErrorRule).items() if name != "name"}
REQUIRED = {name for name in FIELDS if not hasattr(ErrorRule, name)}  # those without a default


@cache
def load_rules(folder: Path = FOLDER) -> tuple[ErrorRule, ...]:
    """Load all rules of a folder.

    Raise ValueError if a file is no TOML, or a rule lacks a field, or has one that is unknown or of
    the wrong type.
    """
    rules = []
    for file in sorted(folder.glob("*.toml")):
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{file}: {error}") from None
        rules += [_make_rule(f"{file}, rule {name!r}", name, tables[name]) for name in tables]
    return tuple(rules)


def _make_rule(where: str, name: str, fields: Any) -> ErrorRule:
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: it must be a table")
    if missing := REQUIRED - fields.keys():
        raise ValueError(f"{where}: lacks {', '.join(sorted(missing))}")
    if unknown := fields.keys() - FIELDS.keys():
        raise ValueError(f"{where}: has unknown {', '.join(unknown)}; use {', '.join(FIELDS)}")
    return ErrorRule(name=name, **{key: _convert(where, key, fields[key]) for key in fields})


def _convert(where: str, key: str, value: Any) -> Any:
    """Return a field's value as `ErrorRule` has it."""
    kind = FIELDS[key]
    texts = value and isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind == tuple[str, ...] and texts:
        return tuple(value)
    if kind is int and type(value) is int and value > 0:
        return value
    if kind is str and isinstance(value, str):
        return value
    if kind is Kind and value in list(Kind.__members__):
        return Kind[value]
    if kind == re.Pattern[str] | None and isinstance(value, str):
        try:
            return re.compile(value)
        except re.error as error:
            raise ValueError(f"{where}: {key}: {error}") from None
    raise ValueError(f"{where}: {key} must be {EXPECTED[kind]}, got {value!r}")
