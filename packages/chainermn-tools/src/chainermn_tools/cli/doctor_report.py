"""What `chainermn doctor` prints: text, JSON, and Markdown for a bug report."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import time
from collections.abc import Iterable, Sequence

import click
from rich.console import Console

from chainermn_tools import environment
from chainermn_tools.doctor import CheckResult, Context, Stage
from chainermn_tools.formatting import format_count, print_line, print_row, print_text

# Raised when a key of the JSON changes its name or its meaning; a new check or key is
# no change.
SCHEMA = 4
LABELS = {"ok": "ok", "warning": "warning", "failed": "FAILED"}
STYLES = {"ok": "green", "warning": "bold yellow", "failed": "bold red"}
# What a user may take for checked, and the check whose success says that it was.
UNSEEN = {"GPUs": "gpu_communicators", "other hosts": "hosts_communicators"}
LABEL_WIDTH = 2 + max(map(len, LABELS.values()))
INDENT = 4


def worst_status(results: Sequence[CheckResult]) -> str:
    """Return ``"failed"``, ``"warning"`` or ``"ok"``; skipped checks don't count."""
    statuses = {result.status for result in results}
    for status in ("failed", "warning"):
        if status in statuses:
            return status
    return "ok"


def summary(results: Sequence[CheckResult]) -> str:
    """Return what failed, what was warned of, and what was not checked."""
    parts = []
    failed = [one.name for one in results if one.status == "failed"]
    if failed:
        parts.append(
            f"{format_count(len(failed), 'check')} failed: {', '.join(failed)}."
        )
    warned = [one.name for one in results if one.status == "warning"]
    if warned:
        parts.append(f"{format_count(len(warned), 'warning')}: {', '.join(warned)}.")
    if not parts:
        parts.append("All is well.")
    passed = {result.name for result in results if result.status == "ok"}
    unseen = [what for what, check in UNSEEN.items() if check not in passed]
    if unseen:
        parts.append(f"Not checked: {', '.join(unseen)}.")
    return " ".join(parts)


def show_json(
    coming: Iterable[CheckResult], context: Context, started: float
) -> list[CheckResult]:
    """Print what docs/doctor.md describes; return the results."""
    results = list(coming)
    worst = worst_status(results)
    findings = []
    for one in results:
        details = dict(one.details)
        if one.blocked_by is not None:
            details["because"] = one.blocked_by
        findings.append(
            {
                "layer": one.stage,
                "name": one.name,
                "question": one.question,
                "status": one.status,
                "found": one.message,
                "fix": one.hint,
                "details": details,
            }
        )
    printed = {
        "schema": SCHEMA,
        "well": worst == "ok",
        "status": worst,
        "seconds": round(time.monotonic() - started, 1),
        "asked": {
            "ranks": context.ranks,
            "hosts": [dataclasses.asdict(host) for host in context.hosts],
            "script": context.script,
        },
        "findings": findings,
    }
    click.echo(json.dumps(printed, indent=2))
    return results


def show_markdown(
    stages: Sequence[Stage], coming: Iterable[CheckResult], context: Context
) -> list[CheckResult]:
    """Print results and environment in Markdown, folded away below one line."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=False)
    results = show_text(stages, coming, console)
    console.print()
    environment.render(context.facts, console)
    body = file.getvalue().rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    click.echo(
        f"<details><summary>chainermn doctor: {summary(results)}</summary>\n\n"
        f"{fence}text\n{body}\n{fence}\n\n</details>"
    )
    return results


def show_text(
    stages: Sequence[Stage],
    coming: Iterable[CheckResult],
    console: Console | None = None,
) -> list[CheckResult]:
    """Print the stages' results as they come, and a summary; return the results.

    On a terminal sentences are wrapped to its width, and a hint is never broken, so
    that it can be copied; elsewhere each is one line, printed at once.
    """
    console = console or Console()
    width = max(len(check.name) for stage in stages for check in stage.checks)
    shown: list[CheckResult] = []
    coming = iter(coming)
    for stage in stages:
        print_line(stage.title, console, "bold")
        skipped: dict[str, list[str]] = {}  # checks by why they were
        for result in itertools.islice(coming, len(stage.checks)):
            shown.append(result)
            if result.status != "skipped":
                _show(result, width, console)
            else:
                reason = "nothing to check"
                if result.blocked_by is not None:
                    reason = result.message
                skipped.setdefault(reason, []).append(result.name)
            console.file.flush()
        for reason, names in skipped.items():
            row = f"skipped ({reason}): {', '.join(names)}"
            print_text(row, console, "dim", INDENT)
        console.print()
    print_text(summary(shown), console, STYLES[worst_status(shown)])
    return shown


def _show(result: CheckResult, width: int, console: Console) -> None:
    """Print a result; ``width`` is that of the longest name of a check."""
    label = (f"  {LABELS[result.status]}", STYLES[result.status])
    name = (result.name, "bold")
    print_row((label, name, (result.message, "")), (LABEL_WIDTH, width), console)
    if result.hint is not None:
        hint = " ".join(result.hint.split("\n"))
        print_line(f"{INDENT * ' '}fix: {hint}", console, "green")
