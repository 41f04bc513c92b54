"""Runs the checks one after another, and yields a result for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from chainermn_tools.doctor import gpus, hosts, machine, ranks, slurm, software
from chainermn_tools.doctor.check import Check, CheckResult, Context, failed, skipped
from chainermn_tools.doctor.hints import REPORT_IT, hint_for
from chainermn_tools.formatting import printable
from chainermn_tools.jobs import Unavailable


@dataclass(frozen=True)
class Stage:
    """Checks that are shown together."""

    name: str  # what JSON calls it
    title: str  # what people read
    checks: tuple[Check, ...]  # in the order in which they are run and shown


LOCAL = Stage(
    "here",
    "This machine",
    (*software.checks, *machine.checks, *slurm.checks, *gpus.checks),
)
RANKS = Stage("live", "Ranks on this machine", tuple(ranks.checks))
HOSTS = Stage("hosts", "Over the hosts", (*hosts.login_checks, *hosts.rank_checks))


def run_checks(stages: Sequence[Stage], context: Context) -> Iterator[CheckResult]:
    """Run the stages one after another, and yield a result for every check."""
    results: dict[str, CheckResult] = {}
    for stage in stages:
        for check in stage.checks:
            found = _blocked(check, results) or _run_check(check, context)
            # Hosts may send control characters.
            results[check.name] = replace(
                found,
                message=printable(found.message, kept="\n").strip(),
                name=check.name,
                question=check.question,
                stage=stage.name,
            )
            yield results[check.name]


def _run_check(check: Check, context: Context) -> CheckResult:
    try:
        return check.run(context)
    except Unavailable as error:
        return failed(str(error), hint_for(str(error), "run it by hand to see more"))
    except Exception as error:  # whatever the error is, the other checks go on
        message = f"the check itself failed: {type(error).__name__}: {error}"
        default = f"this is a mistake of the doctor; {REPORT_IT}"
        return failed(message, hint_for(message, default))


def _blocked(check: Check, earlier: Mapping[str, CheckResult]) -> CheckResult | None:
    """Return why a check is skipped: one that it needs has failed. None if it isn't."""
    for name in check.needs:
        result = earlier[name]
        cause = name if result.status == "failed" else result.blocked_by
        if cause is not None:
            return skipped(f"{cause!r} failed", blocked_by=cause)
    return None
