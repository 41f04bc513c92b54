"""Formats bytes, durations, counts, and text of foreign origin; prints lines, text and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

KIB = 1 << 10
# The width of a table outside of a terminal, where nothing is folded.
PLAIN_WIDTH = 1 << 20
MOST_RECORDS = 32
GAP = 2  # between columns
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def format_bytes(nbytes: float) -> str:
    """Return a number of bytes as text, such as ``1.5 MiB``."""
    power = 0
    while nbytes >= KIB and power < len(BYTE_UNITS) - 1:
        nbytes /= KIB
        power += 1
    return f"{_three_digits(nbytes)} {BYTE_UNITS[power]}"


def format_duration(seconds: float) -> str:
    """Return a duration in seconds as text, such as ``12 ms``."""
    if not seconds:
        return "0 s"
    fitting = [each for each in TIME_UNITS if seconds >= each[1]]
    unit, scale = (fitting or TIME_UNITS[-1:])[0]
    return f"{_three_digits(seconds / scale)} {unit}"


def _three_digits(value: float) -> str:
    """Return a number with three significant digits, or more before its point."""
    if value >= 99.5:
        return f"{value:.0f}"
    return f"{value:.3g}"


def format_count(number: int, what: str) -> str:
    """Return a number of things as text, such as ``3 ranks``."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what}s"


def join_first(items: Sequence[object], limit: int, separator: str = ", ") -> str:
    """Return the first items as text, such as ``0, 1, ...``."""
    words = [str(item) for item in items[:limit]]
    if len(items) > limit:
        words.append("...")
    return separator.join(words)


def printable(text: str, kept: str = "") -> str:
    """Return the text with unprintable characters, except ``kept``, replaced by spaces."""
    for character in {*text}:
        if not character.isprintable() and character not in kept:
            text = text.replace(character, " ")
    return text


def format_value(key: str, value: Any) -> str:
    """Return a value of a record as text; the key, or its end, says which unit the value has."""
    kind = key.rpartition("_")[2]
    if value is None:
        return "-"
    if key == "at_seconds":  # a point in time, to be found in other views of the run
        return f"{value:.6f} s"
    if kind == "seconds":
        return format_duration(value)
    if kind == "bytes":
        return format_bytes(value)
    if kind == "share":
        return f"{value:.0%}"
    if kind == "second":
        return _three_digits(value)
    return str(value)


def heading(key: str) -> str:
    """Return the key of a record as people read it; values name their units."""
    if key == "gb_per_second":
        return "GB/s"
    for unit in ("_seconds", "_bytes", "_share"):
        key = key.removesuffix(unit)
    return key.replace("_per_second", "/s").replace("_", " ")


def make_console(**how: Any) -> Console:
    """Return a console, of standard output by default, that folds lines only on a terminal."""
    from rich.console import Console

    console = Console(highlight=False, **how)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def print_line(text: str, console: Console, style: str = "") -> None:
    """Print a line and never break it; only terminals get a style."""
    from rich.text import Text

    console.print(Text(printable(text, kept="\n"), style=style), soft_wrap=True)


def print_text(text: str, console: Console, style: str = "", indent: int = 0) -> None:
    """Print an indented sentence, wrapped to a terminal's width; elsewhere as one line."""
    from rich.padding import Padding
    from rich.text import Text

    if console.is_terminal:
        console.print(Padding.indent(Text(text, style=style, overflow="fold"), indent))
    else:
        print_line(" " * indent + " ".join(text.split("\n")), console)


def print_row(
    cells: Sequence[tuple[str, str]], widths: Sequence[int], console: Console
) -> None:
    """Print texts with their styles side by side; the last one has no width.

    The console folds texts that are too long. Outside of a terminal each text is one
    line.
    """
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, GAP, 0, 0))
    for width in widths:
        row.add_column(width=width, overflow="fold")
    row.add_column(overflow="fold")
    texts = [Text(printable(text, kept="\n"), style=style) for text, style in cells]
    if not console.is_terminal:
        texts = [Text(text.plain.replace("\n", " ")) for text in texts]
    row.add_row(*texts)
    console.print(row)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    console: Console,
    words: Sequence[str] = (),  # the columns that hold words; others hold numbers
) -> None:
    """Print a table; on a terminal that is too narrow rich folds its cells."""
    from rich.table import Column, Table
    from rich.text import Text

    print_line(f"\n{title}", console, "bold")
    padding = (0, GAP, 0, 0)
    heads = [Column(name, justify="right", overflow="fold") for name in columns]
    for head in heads:
        if head.header in words:
            head.justify = "left"
    table = Table(*heads, box=None, pad_edge=False, padding=padding, header_style="dim")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)


def print_records(
    title: str, records: Sequence[dict[str, Any]], console: Console
) -> None:
    """Print the first records of the ``--json`` output for people; nothing if there is none."""
    if not records:
        return
    columns = [heading(key) for key in records[0]]
    words = [
        heading(key) for key, value in records[0].items() if isinstance(value, str)
    ]
    rows = [
        [format_value(key, value) for key, value in record.items()]
        for record in records[:MOST_RECORDS]
    ]
    print_table(title, columns, rows, console, words)
    more = len(records) - MOST_RECORDS
    if more > 0:
        print_line(f"and {more} more", console)
