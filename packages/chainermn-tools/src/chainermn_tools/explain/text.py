"""What was found in a log, as text: with colours on a terminal, plain anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from chainermn_tools.explain.known import Kind
from chainermn_tools.explain.search import Found

if TYPE_CHECKING:
    from rich.console import Console

COMMAND_INDENT = 4
NOTHING = (
    "Nothing in it is known to `chainermn explain`. Read the earliest traceback of all ranks; "
    "`chainermn env` prints what a bug report needs."
)
ECHOES_ONLY = (
    "All of this only says that something else failed. What failed is not in this log, or not "
    "known: read the earliest traceback of all ranks."
)


def render(found: Sequence[Found], console: Console) -> None:
    """Print what was found.

    Args:
        found: as :func:`search` returns it.
        console: where to. On a terminal sentences are wrapped to its width; elsewhere each is
            one line.
    """
    for style, text in _lines(found):
        if console.is_terminal:
            _print_on_terminal(style, text, console)
        else:
            print(text, file=console.file)


def _print_on_terminal(style: str, text: str, console: Console) -> None:
    from rich.padding import Padding
    from rich.text import Text

    indented = len(text) - len(text.lstrip())
    if not text:
        console.print()
    elif indented == COMMAND_INDENT:  # unbroken, so that it can be copied
        console.print(Text(text, style=style), soft_wrap=True)
    else:
        console.print(Padding.indent(Text(text.lstrip(), style=style), indented))


def _lines(found: Sequence[Found]) -> Iterator[tuple[str, str]]:
    """Pairs of style and line."""
    if not found:
        yield "", NOTHING
        return
    for one in found:
        known = one.known
        often = f", {one.times} such lines" if one.times > 1 else ""
        yield "bold red" if known.kind is Kind.CAUSE else "bold", f"{known.name}: {one.text}"
        yield "dim", f"  line {one.line}{often}; {known.component}; {known.kind.value}"
        yield "", f"  {known.meaning}"
        yield from (("green", f"{' ' * COMMAND_INDENT}{fix}") for fix in known.fix)
        yield "", ""
    if all(one.known.kind is Kind.ECHO for one in found):
        yield "bold", ECHOES_ONLY
