"""Formats bytes, durations, counts, and text of foreign origin; prints lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

KIB = 1 << 10
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes as text, such as ``1.5 MiB``."""
    power = 0
    while nbytes >= KIB and power < len(UNITS) - 1:
        nbytes /= KIB
        power += 1
    return f"{nbytes:.0f} {UNITS[power]}" if nbytes >= 10 else f"{nbytes:.3g} {UNITS[power]}"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds as text, such as ``12 ms``."""
    if not seconds:
        return "0"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, scale = next((one for one in units if seconds >= one[1]), units[-1])
    value = seconds / scale
    return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"


def format_count(number: int, what: str) -> str:
    """Return a number of things as text, such as ``3 ranks``."""
    return f"{number} {what}{'s' * (number != 1)}"


def join_first(items: Sequence[object], limit: int, separator: str = ", ") -> str:
    """Return the first items as text, such as ``0, 1, ...``."""
    return separator.join([*map(str, items[:limit]), *["..."] * (len(items) > limit)])


def printable(text: str, kept: str = "") -> str:
    """Return the text with unprintable characters, except ``kept``, replaced by spaces."""
    return "".join(c if c.isprintable() or c in kept else " " for c in text)


def print_line(text: str, console: Console, style: str = "") -> None:
    """Print a line and never break it; only terminals get a style."""
    from rich.text import Text

    console.print(Text(printable(text, kept="\n"), style=style), soft_wrap=True)
