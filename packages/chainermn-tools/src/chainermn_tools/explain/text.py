"""Prints what was found in a log: with colours on a terminal, plain anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from chainermn_tools.explain.error_rules import Kind
from chainermn_tools.explain.search import Match
from chainermn_tools.explain.verdict import Verdict
from chainermn_tools.formatting import print_line, print_text

if TYPE_CHECKING:
    from rich.console import Console

COMMAND_INDENT = 4
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
            **{"id": one.rule.name.replace("-", "_"), "kind": one.rule.kind.name.lower()},
            **{"component": one.rule.component, "line": one.line, "times": one.times},
            **{"text": one.text, "meaning": one.rule.meaning, "fix": list(one.rule.fix)},
        }
        for one in found
    ]
    said = verdict and {**asdict(verdict), "next_step": verdict.next_step}
    return {"verdict": said, "known": known}


def render(found: Sequence[Match], verdict: Verdict | None, console: Console) -> None:
    """Print what `search` found: on a terminal wrapped to its width, elsewhere as it is."""
    for style, text in _lines(found, verdict):
        indented = len(text) - len(text.lstrip())
        if indented >= COMMAND_INDENT:  # unbroken, so that it can be copied
            print_line(text, console, style)
        else:
            print_text(text.lstrip(), console, style, indented)


def _lines(found: Sequence[Match], verdict: Verdict | None) -> Iterator[tuple[str, str]]:
    """Return pairs of style and line."""
    if verdict:
        yield "bold red", verdict.headline
        yield "dim", f"  line {verdict.line}"
        indent = " " * COMMAND_INDENT
        yield from (("", f"{indent}{line}") for line in verdict.traceback.splitlines())
        yield "green", f"  {verdict.next_step}"
        yield "", ""
    elif not found:
        yield "", NOTHING
        return
    for one in found:
        rule = one.rule
        often = f", {one.times} such lines" if one.times > 1 else ""
        yield "bold red" if rule.kind is Kind.ROOT_CAUSE else "bold", f"{rule.name}: {one.text}"
        yield "dim", f"  line {one.line}{often}; {rule.component}; {rule.kind.value}"
        yield "", f"  {rule.meaning}"
        yield from (("green", f"{' ' * COMMAND_INDENT}{fix}") for fix in rule.fix)
        yield "", ""
    if not verdict and all(one.rule.kind is Kind.SECONDARY for one in found):
        yield "bold", SECONDARY_ONLY
