"""What `chainermn doctor` prints: text, JSON, and Markdown for a bug report."""

from __future__ import annotations

import html
import io
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import click
from rich.console import Console

from chainermn_tools import environment
from chainermn_tools.doctor import CheckResult, Context, Stage
from chainermn_tools.formatting import (
    format_count,
    make_console,
    print_line,
    print_row,
    print_text,
)

# Raised when a key of the JSON changes its name or its meaning; a new check or key is
# no change.
SCHEMA = 4
# What the JSON calls the fields of a result.
JSON_NAMES = {
    "message": "found",
    "hint": "fix",
    "blocked_by": "because",
    "stage": "layer",
}
LABELS = {"ok": "ok", "warning": "warning", "failed": "FAILED"}
STYLES = {"ok": "green", "warning": "bold yellow", "failed": "bold red"}
# What a user may expect to be checked, and the check whose success shows that it was.
UNSEEN = {"GPUs": "gpu_communicators", "other hosts": "hosts_communicators"}
LABEL_WIDTH = 9
NAME_WIDTH = 19  # the length of the longest check's name
INDENT = 4


def worst_status(results: Sequence[CheckResult]) -> str:
    """Return ``"failed"``, ``"warning"`` or ``"ok"``; skipped checks don't count."""
    statuses = [one.status for one in results if one.status != "skipped"]
    return max(statuses, key=list(LABELS).index, default="ok")


def summary(results: Sequence[CheckResult]) -> str:
    """Return a text that names failures, warnings, and skipped checks."""
    names: dict[str, list[str]] = {}
    for one in results:
        names.setdefault(one.status, []).append(one.name)
    verdict = ""
    if failed := names.get("failed"):
        verdict += f"{format_count(len(failed), 'check')} failed: {', '.join(failed)}. "
    if warned := names.get("warning"):
        verdict += f"{format_count(len(warned), 'warning')}: {', '.join(warned)}. "
    verdict = verdict or "All is well. "
    passed = names.get("ok", ())
    if unseen := [what for what, check in UNSEEN.items() if check not in passed]:
        verdict += f"Not checked: {', '.join(unseen)}."
    return verdict.strip()


def show_json(
    _: Sequence[Stage], coming: Iterable[CheckResult], context: Context
) -> list[CheckResult]:
    """Print the JSON that docs/doctor.md describes; return the results."""
    results = list(coming)
    worst = worst_status(results)
    findings = [
        {JSON_NAMES.get(name, name): value for name, value in asdict(one).items()}
        for one in results
    ]
    asked = {
        "ranks": context.ranks,
        "hosts": [asdict(host) for host in context.hosts],
        "script": context.script,
    }
    printed = {"schema": SCHEMA, "well": worst == "ok", "status": worst}
    click.echo(json.dumps({**printed, "asked": asked, "findings": findings}, indent=2))
    return results


def show_markdown(
    stages: Sequence[Stage], coming: Iterable[CheckResult], context: Context
) -> list[CheckResult]:
    """Print results and facts in Markdown, folded away below one line."""
    file = io.StringIO()
    console = make_console(file=file)
    results = _show_all(stages, coming, console)
    console.print()
    environment.render(context.facts, console)
    body = html.escape(file.getvalue().rstrip(), quote=False)
    click.echo(
        f"<details><summary>chainermn doctor: {summary(results)}</summary>\n\n"
        f"<pre>\n{body}\n</pre>\n\n</details>"
    )
    return results


def show_text(
    stages: Sequence[Stage], coming: Iterable[CheckResult], _: Context
) -> list[CheckResult]:
    """Print the results as they come."""
    return _show_all(stages, coming, make_console())


def _show_all(
    stages: Sequence[Stage], coming: Iterable[CheckResult], console: Console
) -> list[CheckResult]:
    """Print the stages' results as they come, and a summary; return the results.

    On a terminal sentences are wrapped to its width. A hint is never broken, so that it
    can be copied. Elsewhere each result is one line, printed at once.
    """
    shown: list[CheckResult] = []
    coming = iter(coming)
    for stage in stages:
        print_line(stage.title, console, "bold")
        skipped: dict[str, list[str]] = {}  # skipped checks by reason
        for result in itertools.islice(coming, len(stage.checks)):
            shown.append(result)
            if result.status != "skipped":
                _show(result, console)
            else:
                cause = result.blocked_by
                reason = f"{cause} failed" if cause else "nothing to check"
                skipped.setdefault(reason, []).append(result.name)
            console.file.flush()
        for reason, names in skipped.items():
            line = f"skipped ({reason}): {', '.join(names)}"
            print_text(line, console, "dim", INDENT)
        console.print()
    print_text(summary(shown), console, STYLES[worst_status(shown)])
    return shown


def _show(result: CheckResult, console: Console) -> None:
    label = (f"  {LABELS[result.status]}", STYLES[result.status])
    name = (result.name, "bold")
    print_row((label, name, (result.message, "")), (LABEL_WIDTH, NAME_WIDTH), console)
    if result.hint is not None:
        hint = " ".join(result.hint.split("\n"))
        print_line(f"{INDENT * ' '}fix: {hint}", console, "green")
