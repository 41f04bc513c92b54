"""The findings as text: with colours and wrapped on a terminal, plain anywhere else."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from chainermn_tools.doctor.check import Finding
from chainermn_tools.doctor.runner import Layer

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "-"}
STYLES = {"ok": "green", "warning": "bold yellow", "failed": "bold red", "skipped": "dim"}
WORD_WIDTH = max(map(len, WORDS.values()))
# Below it what was found goes on a line of its own.
NARROW = 80
INDENT = "    "


def show_all(
    layers: Sequence[Layer], findings: Iterable[Finding], console: Console
) -> list[Finding]:
    """Print findings as they come, layer by layer, and what they come to.

    Args:
        layers: that are run.
        findings: of all their checks, in their order.
        console: see :func:`show`.

    Returns:
        The findings.
    """
    width = max(len(check.name) for layer in layers for check in layer.checks)
    seen: list[Finding] = []
    coming = iter(findings)
    for layer in layers:
        _print_line(console, "bold", layer.title)
        refused: dict[str, int] = {}  # checks for whose sake others were left out
        for finding in itertools.islice(coming, len(layer.checks)):
            seen.append(finding)
            because = finding.details.get("because")
            if because is None:
                show(finding, width, console)
            else:
                refused[because] = refused.get(because, 0) + 1
            console.file.flush()
        for because, count in refused.items():
            checks = "1 check was" if count == 1 else f"{count} checks were"
            _print_line(console, "dim", f"{INDENT}{checks} left out, since {because!r} failed")
        _print_line(console, "", "")
    _print_line(console, "bold " + STYLES[worst(seen)], summary(seen))
    return seen


def show(finding: Finding, width: int, console: Console) -> None:
    """Print a finding.

    Args:
        finding: of any check.
        width: of the longest name of a check.
        console: where to. On a terminal sentences are wrapped to its width, and a fix is never
            broken, so that it can be copied; elsewhere each is one line, at once.
    """
    word = f"  {WORDS[finding.status]:{WORD_WIDTH}}"
    bad = finding.status in ("warning", "failed")
    first = finding.question if bad else finding.found
    if not console.is_terminal:
        print(f"{word}  {finding.name:{width}}  {_one_line(first)}".rstrip(), file=console.file)
    else:
        _print_row(console, finding, word, width, first)
    if bad:
        _print_wrapped(console, INDENT, finding.found)
        _print_line(console, "green", f"{INDENT}fix: {_one_line(finding.fix or '')}")


def summary(findings: Sequence[Finding]) -> str:
    """What it comes to, in a sentence."""
    parts = [
        f"{word}: {', '.join(names)}"
        for status, word in (("failed", "failed"), ("warning", "warned of"))
        if (names := [one.name for one in findings if one.status == status])
    ]
    return f"Not all is well; {'; '.join(parts)}." if parts else "All is well."


def worst(findings: Sequence[Finding]) -> str:
    """``"failed"``, ``"warning"`` or ``"ok"``."""
    found = {one.status for one in findings}
    return next((status for status in ("failed", "warning") if status in found), "ok")


def _print_row(console: Console, finding: Finding, word: str, width: int, first: str) -> None:
    from rich.table import Table
    from rich.text import Text

    style = STYLES[finding.status]
    if console.width < NARROW:
        console.print(Text.assemble((word, style), "  ", (finding.name, "bold")))
        _print_wrapped(console, INDENT, first, "dim" if finding.status == "skipped" else "")
        return
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=len(word), no_wrap=True)
    row.add_column(width=width, no_wrap=True)
    row.add_column(overflow="fold", ratio=1)
    shade = "dim" if finding.status == "skipped" else ""
    row.add_row(Text(word, style=style), Text(finding.name, style="bold"), Text(first, style=shade))
    console.print(row)


def _print_wrapped(console: Console, indent: str, text: str, style: str = "") -> None:
    if not console.is_terminal:
        print(f"{indent}{_one_line(text)}", file=console.file)
        return
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding.indent(Text(text, style=style, overflow="fold"), len(indent)))


def _print_line(console: Console, style: str, text: str) -> None:
    if not console.is_terminal:
        print(text, file=console.file)
        return
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=True)


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))
