"""The report as text: a table on a terminal, plain unbroken lines anywhere else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

# rich is imported where it is used: the ranks of `chainermn launch` import this package too.
if TYPE_CHECKING:
    from rich.console import Console

# Many lines long, and seldom wanted; JSON has it.
LEFT_OUT = "description"


def render(report: dict[str, Any], console: Console) -> None:
    """Print a report.

    Args:
        report: as :func:`collect` returns it.
        console: where to. On a terminal long values are folded to its width; elsewhere each
            value is one line, whatever its length, so that it can be searched.
    """
    from rich.table import Table
    from rich.text import Text

    for name, section in report.items():
        if name == "schema":
            continue
        rows = list(_rows("", section))
        if not console.is_terminal:
            _print_plain(name, rows, console)
            continue
        table = Table.grid(padding=(0, 2))
        table.add_column(overflow="fold")
        table.add_column(overflow="fold", ratio=1)
        for key, value in rows:
            style = "yellow" if value.startswith("unavailable") else ""
            table.add_row(Text(key, style="dim"), Text(value, style=style))
        console.print(Text(name, style="bold"))
        console.print(table)
        console.print()


def _print_plain(name: str, rows: list[tuple[str, str]], console: Console) -> None:
    print(name, file=console.file)
    width = max((len(key) for key, _ in rows), default=0)
    for key, value in rows:
        print(f"  {key:{width}}  {value}".rstrip(), file=console.file)
    print(file=console.file)


def _rows(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Lines of (key, value); a nested key is written after its parent's."""
    if isinstance(value, dict) and "unavailable" in value:
        yield key, f"unavailable: {value['unavailable']}"
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name != LEFT_OUT:
                full = f"{key} {name.removesuffix('_bytes')}".strip()
                yield from _rows(full, _sized(name, inner))
    elif isinstance(value, list):
        if not value:
            yield key, "none"
        for number, inner in enumerate(value):
            yield key if number == 0 else "", _line(inner)
    else:
        yield key, _line(value)


def _line(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        pairs = ((name.removesuffix("_bytes"), _sized(name, one)) for name, one in value.items())
        return ", ".join(f"{name} {_line(one)}" for name, one in pairs)
    return str(value)


def _sized(name: str, value: Any) -> Any:
    """A number of bytes, in words; anything else as it is."""
    if not name.endswith("_bytes") or not isinstance(value, int):
        return value
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
