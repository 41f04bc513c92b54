"""The list of differences from older versions, each told by a row of docs/moving.md."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

LIST = Path(__file__).parent / "given" / "differences.toml"


@dataclass(frozen=True)
class Difference:
    """An entry; all but its row and why are patterns, in which only ``*`` has a meaning."""

    row: str  # words of docs/moving.md that tell it
    why: str
    cases: tuple[str, ...] = ()
    signatures: tuple[str, ...] = ()
    # Cases in which the older one hangs or dies; it isn't asked.
    hung: tuple[str, ...] = ()
    # The differences inside these cases, as `fits` takes them.
    where: tuple[str, ...] = ()
    since: tuple[int, ...] = ()  # the Python from which on they differ

    @property
    def patterns(self) -> tuple[str, ...]:
        return self.cases + self.signatures + self.hung


def load() -> list[Difference]:
    with LIST.open("rb") as file:
        entries = tomllib.load(file)["difference"]
    found = [
        Difference(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
        )
        for entry in entries
    ]
    return [each for each in found if sys.version_info >= each.since]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the name, or that of a signature without its table's, is of one of the patterns."""
    if "[" not in name:
        names = {name, name.partition(" ")[2] or name}
    else:
        names = {name}
    return any(
        fnmatchcase(each, plain(pattern)) for pattern in patterns for each in names
    )


def fits(difference: str, pattern: str) -> bool:
    """Whether a line of `differences` is of the pattern: of a path, or with both values."""
    path, colon, values = difference.partition(": ")
    found = path
    if colon in pattern:
        found = path + colon + values
    return fnmatchcase(found, plain(pattern))


def plain(pattern: str) -> str:
    return pattern.replace("[", "[[]").replace("?", "[?]")
