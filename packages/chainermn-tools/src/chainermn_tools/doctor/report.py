"""The findings for programs, as JSON, and for people who help, as text to paste."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

from chainermn_tools import environment
from chainermn_tools.doctor import text
from chainermn_tools.doctor.check import Context, Finding
from chainermn_tools.doctor.runner import Layer
from chainermn_tools.environment import probe

# Raised when a key changes its name or its meaning. Another check or another key is no change.
SCHEMA = 1
# Of the time for the environment, what programs may take that are asked.
PROGRAMS_SHARE = 0.7


def as_dict(findings: Sequence[Finding], context: Context, seconds: float) -> dict[str, Any]:
    """What ``chainermn doctor --json`` prints; docs/doctor.md describes it.

    Args:
        findings: of all checks.
        context: what was examined.
        seconds: how long that took.
    """
    worst = text.worst(findings)
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
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def pasteable(
    layers: Sequence[Layer], findings: Sequence[Finding], seconds: float, of_environment: float
) -> str:
    """Findings and environment in Markdown, folded away below one line.

    Args:
        layers: that were run.
        findings: of all checks.
        seconds: how long that took.
        of_environment: how long looking at the environment may take.
    """
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, force_terminal=False)
    text.show_all(layers, findings, console)
    print(f"({seconds:.0f} s)\n", file=file)
    programs = of_environment * PROGRAMS_SHARE
    (found,) = probe.run_concurrently(
        {"environment": lambda: environment.collect(programs)}, of_environment
    ).values()
    environment.render(found if "schema" in found else {"environment": found}, console)
    body = file.getvalue().rstrip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", body)), default=0))
    return (
        f"<details><summary>chainermn doctor: {text.summary(findings)}</summary>\n\n"
        f"{fence}text\n{body}\n{fence}\n\n</details>"
    )
