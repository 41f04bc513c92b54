"""Makes the tables that benchmarks print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def make_table(
    first: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    title: str | None = None,
) -> Table:
    """Return a table: a column of names, whose header is ``first``, and columns of numbers."""
    table = Table(
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    # It alone is wrapped where a terminal is narrow: numbers stay whole.
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
