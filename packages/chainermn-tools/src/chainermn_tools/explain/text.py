"""Prints the findings in a log: with colours on a terminal, plain anywhere else."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from chainermn_tools.explain.error_rules import Kind
from chainermn_tools.explain.failed_rank import Verdict
from chainermn_tools.explain.next_steps import LABEL
from chainermn_tools.explain.search import Findings, Match
from chainermn_tools.formatting import print_line, print_text

if TYPE_CHECKING:
    from rich.console import Console

INDENT = " " * 4  # of lines that are never broken, so that they can be copied
SECONDARY_ONLY = (
    "These lines only follow from another failure. Read the first traceback."
)


def as_dict(findings: Findings) -> dict[str, Any]:
    """Return what ``--json`` prints: the verdict, and the known errors."""
    verdict = None
    if findings.verdict:
        verdict = asdict(findings.verdict)
        verdict["next_step"] = findings.verdict.next_step.removeprefix(LABEL)
    known = [_match_as_dict(match) for match in findings.matches]
    return {"verdict": verdict, "known": known, "note": _note(findings)}


def _note(findings: Findings) -> str | None:
    """Return the text for a log that doesn't tell why the job failed."""
    if findings.verdict:
        return None
    if not findings.matches:
        return findings.nothing
    if findings.matches[0].rule.kind is Kind.SECONDARY:
        return SECONDARY_ONLY
    return None


def _match_as_dict(match: Match) -> dict[str, Any]:
    return {
        "id": match.rule.name,
        "kind": match.rule.kind.name.lower(),
        "component": match.rule.component,
        "line": match.line,
        "times": match.times,
        "text": match.text,
        "meaning": match.rule.meaning,
        "fix": match.fix,
    }


def render(findings: Findings, console: Console) -> None:
    """Print the findings of `search`: on a terminal wrapped to its width, elsewhere unchanged.

    The verdict is last, because a terminal shows the last lines.
    """
    for match in findings.matches:
        _render_match(match, console)
    if findings.verdict:
        _render_verdict(findings.verdict, console)
    elif note := _note(findings):
        print_text(note, console, "bold")


def _render_verdict(verdict: Verdict, console: Console) -> None:
    for line in verdict.traceback.splitlines():
        print_line(f"{INDENT}{line}", console)
    print_text(verdict.headline, console, "bold red")
    print_text(f"line {verdict.line}", console, "dim", 2)
    print_text(verdict.next_step, console, "green", 2)


def _render_match(match: Match, console: Console) -> None:
    rule = match.rule
    style = "bold"
    if rule.kind is Kind.ROOT_CAUSE:
        style = "bold red"
    where = f"line {match.line}"
    if match.times > 1:
        where = f"{where}, {match.times} such lines"
    print_text(f"{rule.name}: {match.text}", console, style)
    print_text(f"{where}: {rule.kind.value}", console, "dim", 2)
    print_text(rule.meaning, console, indent=2)
    for fix in match.fix:
        print_line(f"{INDENT}{fix}", console, "green")
    console.print()
