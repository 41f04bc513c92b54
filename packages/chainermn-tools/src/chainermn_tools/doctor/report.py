"""The results as text for terminals and files, as JSON, and as Markdown for a bug report."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from chainermn_tools import environment
from chainermn_tools.doctor.check import CheckResult, Context
from chainermn_tools.doctor.runner import Stage

if TYPE_CHECKING:
    from rich.console import Console

# Raised when a key of the JSON changes its name or its meaning; a new check or key is no change.
SCHEMA = 1
# Of the time for the environment, what the programs may take that are asked.
PROGRAMS_SHARE = 0.7
LABELS = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "-"}
STYLES = {"ok": "green", "warning": "bold yellow", "failed": "bold red", "skipped": "dim"}
LABEL_WIDTH = max(map(len, LABELS.values()))
# On a narrower terminal the message goes on a line of its own.
NARROW_WIDTH = 80
INDENT = "    "


def worst_status(results: Sequence[CheckResult]) -> str:
    """Return ``"failed"``, ``"warning"`` or ``"ok"``; skipped checks don't count."""
    statuses = {result.status for result in results}
    return next((status for status in ("failed", "warning") if status in statuses), "ok")


def summary(results: Sequence[CheckResult]) -> str:
    """Return one sentence about all results."""
    parts = [
        f"{label}: {', '.join(names)}"
        for status, label in (("failed", "failed"), ("warning", "warned of"))
        if (names := [one.name for one in results if one.status == status])
    ]
    return f"Not all is well; {'; '.join(parts)}." if parts else "All is well."


def as_dict(results: Sequence[CheckResult], context: Context, seconds: float) -> dict[str, Any]:
    """Return what ``chainermn doctor --json`` prints; docs/doctor.md describes it.

    Args:
        results: of all checks.
        context: what was examined.
        seconds: how long that took.
    """
    worst = worst_status(results)
    return {
        "schema": SCHEMA,
        "well": worst == "ok",
        "status": worst,
        "seconds": round(seconds, 1),
        "asked": {
            "ranks": context.ranks,
            "hosts": [dataclasses.asdict(host) for host in context.hosts],
            "hostfile": context.hostfile,
            "script": context.script,
        },
        "findings": [
            {
                "layer": one.stage,
                "name": one.name,
                "question": one.question,
                "status": one.status,
                "found": one.message,
                "fix": one.hint,
                "details": {
                    **one.details,
                    **({"because": one.blocked_by} if one.blocked_by else {}),
                },
            }
            for one in results
        ],
    }


def as_markdown(
    stages: Sequence[Stage], results: Sequence[CheckResult], seconds: float, environment_time: float
) -> str:
    """Return results and environment in Markdown, folded away below one line.

    Args:
        stages: that were run.
        results: of all their checks.
        seconds: how long that took.
        environment_time: how long collecting the environment may take, in seconds.
    """
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, force_terminal=False)
    show_all(stages, results, console)
    print(f"({seconds:.0f} s)\n", file=file)
    timeout = environment_time * PROGRAMS_SHARE
    (found,) = environment.run_concurrently(
        {"environment": lambda: environment.collect(timeout)}, environment_time
    ).values()
    environment.render(found if "schema" in found else {"environment": found}, console)
    body = file.getvalue().rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return (
        f"<details><summary>chainermn doctor: {summary(results)}</summary>\n\n"
        f"{fence}text\n{body}\n{fence}\n\n</details>"
    )


def show_all(
    stages: Sequence[Stage], results: Iterable[CheckResult], console: Console
) -> list[CheckResult]:
    """Print results as they come, stage by stage, and a summary.

    Args:
        stages: that are run.
        results: of all their checks, in their order.
        console: where to. On a terminal sentences are wrapped to its width, and a hint is never
            broken, so that it can be copied; elsewhere each is one line, printed at once.

    Returns:
        The results.
    """
    width = max(len(check.name) for stage in stages for check in stage.checks)
    shown: list[CheckResult] = []
    coming = iter(results)
    for stage in stages:
        _print(console, stage.title, "bold")
        blocked: dict[str, int] = {}  # the number of checks that each failed one blocked
        for result in itertools.islice(coming, len(stage.checks)):
            shown.append(result)
            if result.blocked_by is None:
                _show(result, width, console)
            else:
                blocked[result.blocked_by] = blocked.get(result.blocked_by, 0) + 1
            console.file.flush()
        for cause, count in blocked.items():
            checks = "1 check was" if count == 1 else f"{count} checks were"
            _print(console, f"{INDENT}{checks} left out, since {cause!r} failed", "dim")
        _print(console, "")
    _print(console, summary(shown), f"bold {STYLES[worst_status(shown)]}")
    return shown


def _show(result: CheckResult, width: int, console: Console) -> None:
    """Print a result; ``width`` is that of the longest name of a check."""
    label = f"  {LABELS[result.status]:{LABEL_WIDTH}}"
    is_bad = result.status in ("warning", "failed")
    first = result.question if is_bad else result.message
    if not console.is_terminal:
        _print(console, f"{label}  {result.name:{width}}  {_one_line(first)}".rstrip())
    else:
        _print_row(console, result, label, width, first)
    if is_bad:
        _print_wrapped(console, result.message)
        _print(console, f"{INDENT}fix: {_one_line(result.hint or '')}", "green")


def _print_row(console: Console, result: CheckResult, label: str, width: int, first: str) -> None:
    from rich.table import Table
    from rich.text import Text

    shade = "dim" if result.status == "skipped" else ""
    name = Text(result.name, style="bold")
    if console.width < NARROW_WIDTH:
        console.print(Text.assemble((label, STYLES[result.status]), "  ", name))
        _print_wrapped(console, first, shade)
        return
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=len(label), no_wrap=True)
    row.add_column(width=width, no_wrap=True)
    row.add_column(overflow="fold", ratio=1)
    row.add_row(Text(label, style=STYLES[result.status]), name, Text(first, style=shade))
    console.print(row)


def _print_wrapped(console: Console, text: str, style: str = "") -> None:
    """Print an indented sentence, wrapped where lines are as wide as the terminal."""
    if not console.is_terminal:
        _print(console, f"{INDENT}{_one_line(text)}")
        return
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding.indent(Text(text, style=style, overflow="fold"), len(INDENT)))


def _print(console: Console, text: str, style: str = "") -> None:
    """Print a line and never break it; only terminals get a style."""
    from rich.text import Text

    console.print(Text(text, style=style), soft_wrap=True)


def _one_line(text: str) -> str:
    return " ".join(text.split("\n"))
