"""Prints what was found in a log: with colours on a terminal, plain anywhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from chainermn_tools.explain.error_rules import Kind
from chainermn_tools.explain.search import Match
from chainermn_tools.explain.verdict import Verdict
from chainermn_tools.formatting import print_line, print_text

if TYPE_CHECKING:
    from rich.console import Console

INDENT = " " * 4  # of what is never broken, so that it can be copied
NOTHING = (
    "Nothing in it is known to `chainermn explain`. Read the earliest traceback of all ranks; "
    "`chainermn env` prints what a bug report needs."
)
SECONDARY_ONLY = (
    "All of this only says that something else failed. What failed is not in this log, or not "
    "known: read the earliest traceback of all ranks."
)


def as_dict(found: Sequence[Match], verdict: Verdict | None) -> dict[str, Any]:
    """Return what ``--json`` prints, as docs/diagnosing.md describes it."""
    known = [
        {
            **{"id": one.rule.name, "kind": one.rule.kind.name.lower()},
            **{"component": one.rule.component, "line": one.line, "times": one.times},
            **{
                "text": one.text,
                "meaning": one.rule.meaning,
                "fix": list(one.rule.fix),
            },
        }
        for one in found
    ]
    said = verdict and {**asdict(verdict), "next_step": verdict.next_step}
    return {"verdict": said, "known": known}


def render(found: Sequence[Match], verdict: Verdict | None, console: Console) -> None:
    """Print what `search` found: on a terminal wrapped to its width, elsewhere as it is."""
    if verdict:
        print_text(verdict.headline, console, "bold red")
        print_text(f"line {verdict.line}", console, "dim", 2)
        for line in verdict.traceback.splitlines():
            print_line(f"{INDENT}{line}", console)
        print_text(verdict.next_step, console, "green", 2)
        console.print()
    elif not found:
        print_text(NOTHING, console)
        return
    for one in found:
        rule, often = one.rule, f", {one.times} such lines" if one.times > 1 else ""
        style = "bold red" if rule.kind is Kind.ROOT_CAUSE else "bold"
        print_text(f"{rule.name}: {one.text}", console, style)
        where = f"line {one.line}{often}; {rule.component}; {rule.kind.value}"
        print_text(where, console, "dim", 2)
        print_text(rule.meaning, console, indent=2)
        for fix in rule.fix:
            print_line(f"{INDENT}{fix}", console, "green")
        console.print()
    if not verdict and all(one.rule.kind is Kind.SECONDARY for one in found):
        print_text(SECONDARY_ONLY, console, "bold")
