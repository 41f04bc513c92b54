"""What `chainermn doctor` prints: text, JSON, and Markdown for a bug report."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from chainermn_tools import environment
from chainermn_tools.doctor import CheckResult, Context, Stage
from chainermn_tools.formatting import print_line, print_row, print_text

# Raised when a key of the JSON changes its name or its meaning; a new check or key is
# no change.
SCHEMA = 3
# Of the time for the environment, what the programs may take that are asked.
PROGRAMS_SHARE = 0.7
LABELS = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "-"}
STYLES = {
    "ok": "green",
    "warning": "bold yellow",
    "failed": "bold red",
    "skipped": "dim",
}
# What a user may take for checked, and the check whose success says that it was.
UNSEEN = {"GPUs": "communicator_pure_nccl", "other hosts": "placement"}
LABEL_WIDTH = 2 + max(map(len, LABELS.values()))
# On a narrower terminal the message goes on a line of its own.
NARROW_WIDTH = 80
INDENT = 4


def worst_status(results: Sequence[CheckResult]) -> str:
    """Return ``"failed"``, ``"warning"`` or ``"ok"``; skipped checks don't count."""
    statuses = {result.status for result in results}
    return next(
        (status for status in ("failed", "warning") if status in statuses), "ok"
    )


def summary(results: Sequence[CheckResult]) -> str:
    """Return one sentence about all results."""
    labels = (("failed", "failed"), ("warning", "warned of"))
    found = {
        label: [r.name for r in results if r.status == status]
        for status, label in labels
    }
    parts = [f"{label}: {', '.join(names)}" for label, names in found.items() if names]
    passed = {result.name for result in results if result.status == "ok"}
    unseen = [what for what, check in UNSEEN.items() if check not in passed]
    parts += [f"not checked: {' and '.join(unseen)}"] if unseen else []
    verdict = "All is well" if worst_status(results) == "ok" else "Not all is well"
    return f"{'; '.join([verdict, *parts])}."


def as_dict(
    results: Sequence[CheckResult], context: Context, seconds: float
) -> dict[str, Any]:
    """Return what ``--json`` prints after ``seconds``, as docs/doctor.md describes it."""
    worst = worst_status(results)
    return {
        "schema": SCHEMA,
        "well": worst == "ok",
        "status": worst,
        "seconds": round(seconds, 1),
        "asked": {
            **{key: getattr(context, key) for key in ("ranks", "hostfile", "script")},
            "hosts": [dataclasses.asdict(host) for host in context.hosts],
        },
        "findings": [
            {
                "layer": one.stage,
                "name": one.name,
                "question": one.question,
                "status": one.status,
                "found": one.message,
                "fix": one.hint,
                "details": one.details
                | ({"because": one.blocked_by} if one.blocked_by else {}),
            }
            for one in results
        ],
    }


def as_markdown(
    stages: Sequence[Stage],
    results: Sequence[CheckResult],
    seconds: float,
    environment_time: float,
) -> str:
    """Return results and environment in Markdown, folded away below one line.

    The results took ``seconds``, and collecting the environment may take
    ``environment_time``.
    """
    file = io.StringIO()
    console = Console(file=file, force_terminal=False)
    show_all(stages, results, console)
    print(f"({seconds:.0f} s)\n", file=file)
    probe = {
        "environment": lambda: environment.collect(environment_time * PROGRAMS_SHARE)
    }
    found = environment.run_concurrently(probe, environment_time)
    environment.render(
        found["environment"] if "schema" in found["environment"] else found, console
    )
    body = file.getvalue().rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return (
        f"<details><summary>chainermn doctor: {summary(results)}</summary>\n\n"
        f"{fence}text\n{body}\n{fence}\n\n</details>"
    )


def show_all(
    stages: Sequence[Stage], results: Iterable[CheckResult], console: Console
) -> list[CheckResult]:
    """Print the stages' results as they come, and a summary; return the results.

    On a terminal sentences are wrapped to its width, and a hint is never broken, so
    that it can be copied; elsewhere each is one line, printed at once.
    """
    width = max(len(check.name) for stage in stages for check in stage.checks)
    shown: list[CheckResult] = []
    coming = iter(results)
    for stage in stages:
        print_line(stage.title, console, "bold")
        blocked = Counter[str]()  # the number of checks that each failed one blocked
        for result in itertools.islice(coming, len(stage.checks)):
            shown.append(result)
            if result.blocked_by is None:
                _show(result, width, console)
            else:
                blocked[result.blocked_by] += 1
            console.file.flush()
        for cause, count in blocked.items():
            checks = "1 check was" if count == 1 else f"{count} checks were"
            print_line(
                f"{INDENT * ' '}{checks} left out, since {cause!r} failed",
                console,
                "dim",
            )
        console.print()
    print_text(summary(shown), console, f"bold {STYLES[worst_status(shown)]}")
    return shown


def _show(result: CheckResult, width: int, console: Console) -> None:
    """Print a result; ``width`` is that of the longest name of a check."""
    is_bad = result.status in ("warning", "failed")
    first = result.question if is_bad else result.message
    label = (f"  {LABELS[result.status]}", STYLES[result.status])
    name, shade = (result.name, "bold"), "dim" if result.status == "skipped" else ""
    if console.is_terminal and console.width < NARROW_WIDTH:
        print_row((label, name), (LABEL_WIDTH,), console)
        print_text(first, console, shade, INDENT)
    else:
        print_row((label, name, (first, shade)), (LABEL_WIDTH, width), console)
    if is_bad:
        print_text(result.message, console, indent=INDENT)
        hint = " ".join((result.hint or "").split("\n"))
        print_line(f"{INDENT * ' '}fix: {hint}", console, "green")
