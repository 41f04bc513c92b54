"""Formats bytes, durations, counts, and text of foreign origin; prints lines, text and tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

KIB = 1 << 10
# Elsewhere than on a terminal tables are not split for its width.
PLAIN_WIDTH = 200
MOST_RECORDS = 32
GAP = 2  # between columns
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes as text, such as ``1.5 MiB``."""
    power = 0
    while nbytes >= KIB and power < len(UNITS) - 1:
        nbytes /= KIB
        power += 1
    return (
        f"{nbytes:.0f} {UNITS[power]}"
        if nbytes >= 10
        else f"{nbytes:.3g} {UNITS[power]}"
    )


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


def format_value(key: str, value: Any) -> str:
    """Return a value of a record as text; the key, or its end, says what it is."""
    if value is None:
        return "-"
    formats: dict[str, Callable[[Any], str]] = {
        "at_seconds": "{:.6f} s".format,  # a place to find in other views of the same
        "seconds": format_duration,
        "bytes": format_bytes,
        "share": "{:.0%}".format,
        "gb_per_second": lambda rate: "<0.001" if 0 < rate < 0.001 else f"{rate:.3g}",
        "second": lambda rate: f"{rate:,.0f}" if rate > 99.5 else f"{rate:.3g}",
    }
    return formats.get(key, formats.get(key.rpartition("_")[2], str))(value)


def heading(key: str) -> str:
    """Return the key of a record as people read it; values name their units."""
    return (
        "GB/s"
        if key == "gb_per_second"
        else key.removesuffix("_seconds").replace("_", " ")
    )


def print_line(text: str, console: Console, style: str = "") -> None:
    """Print a line and never break it; only terminals get a style."""
    from rich.text import Text

    console.print(Text(printable(text, kept="\n"), style=style), soft_wrap=True)


def print_text(text: str, console: Console, style: str = "", indent: int = 0) -> None:
    """Print an indented sentence, wrapped to a terminal's width; elsewhere it is one line."""
    from rich.padding import Padding
    from rich.text import Text

    if console.is_terminal:
        console.print(Padding.indent(Text(text, style=style, overflow="fold"), indent))
    else:
        print_line(" " * indent + " ".join(text.split("\n")), console)


def print_row(
    cells: Sequence[tuple[str, str]], widths: Sequence[int], console: Console
) -> None:
    """Print texts with their styles side by side; the last one has no width, and is wrapped."""
    from rich.table import Table
    from rich.text import Text

    if not console.is_terminal:
        texts = [" ".join(text.split("\n")) for text, _ in cells]
        first = [f"{text:{width}}" for text, width in zip(texts, widths, strict=False)]
        print_line("  ".join([*first, texts[-1]]).rstrip(), console)
        return
    row = Table.grid(padding=(0, GAP, 0, 0))
    for width in widths:
        row.add_column(width=width, overflow="fold")
    row.add_column(overflow="fold", ratio=1)
    row.add_row(*(Text(text, style=style) for text, style in cells))
    console.print(row)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    console: Console,
    words: Sequence[str] = (),  # the columns that hold words; others hold numbers
) -> None:
    """Print a table; where it is too wide, in parts that each begin with the first column.

    A row without a first cell belongs to the one above, and is dim.
    """
    from rich.table import Table
    from rich.text import Text

    print_line(f"\n{title}", console, "bold")
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for part in _parts(widths, console.width):
        table = Table(
            box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim"
        )
        for name in (columns[number] for number in part):
            table.add_column(
                name, justify="left" if name in words else "right", overflow="fold"
            )
        for row in rows:
            cells = (Text(printable(row[number])) for number in part)
            table.add_row(*cells, style="" if row[0] else "dim")
        console.print(table)


def print_records(
    title: str, records: Sequence[dict[str, Any]], console: Console
) -> None:
    """Print what ``--json`` prints, for people: the first records; nothing without any."""
    if records:
        columns = {key: heading(key) for key in records[0]}
        rows = [
            [*itertools.starmap(format_value, one.items())]
            for one in records[:MOST_RECORDS]
        ]
        words = [
            columns[key] for key, value in records[0].items() if isinstance(value, str)
        ]
        print_table(title, list(columns.values()), rows, console, words)
    if (more := len(records) - MOST_RECORDS) > 0:
        print_line(f"and {more} more", console)


def _parts(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Return numbers of columns that fit beside the first one; one that fits nowhere is alone."""
    part = [0]
    for number in range(1, len(widths)):
        taken = sum(widths[one] + GAP for one in part)
        if len(part) > 1 and taken + widths[number] > room:
            yield part
            part = [0]
        part.append(number)
    yield part
