"""Runs the checks under one deadline and yields a result for every one, whatever hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace

from chainermn_tools.doctor import (
    consistency,
    gpus,
    hosts,
    machine,
    placement,
    slurm,
    software,
)
from chainermn_tools.doctor.check import Check, CheckResult, Context, failed, skipped
from chainermn_tools.doctor.hints import (
    MORE_TIME,
    REPORT_IT,
    hint_for_error,
    hint_for_output,
)
from chainermn_tools.doctor.ranks import checks as ranks
from chainermn_tools.formatting import printable
from chainermn_tools.jobs import Unavailable

MAX_TEXT_LENGTH = 2000
Futures = Mapping[str, "Future[CheckResult]"]
Results = Mapping[str, CheckResult]


@dataclass(frozen=True)
class Stage:
    """Checks that run concurrently."""

    name: str  # what JSON calls it
    title: str  # what people read
    checks: tuple[Check, ...]  # in the order in which they are shown
    # Of the remaining time, how much it may take; the last stage takes all.
    fraction: float


# The names are those of the JSON.
_local = (*software.checks, *machine.checks, *slurm.checks, *gpus.checks)
LOCAL = Stage("here", "This machine", _local, fraction=0.4)
RANKS = Stage("live", "Ranks on this machine", tuple(ranks.checks), fraction=0.5)
_over_hosts = (*hosts.checks, *consistency.checks, *hosts.connection_checks)
_over_hosts += (*slurm.rank_checks, *placement.checks)
CLUSTER = Stage("hosts", "Over the hosts", _over_hosts, fraction=1.0)


def run_checks(stages: Sequence[Stage], context: Context) -> Iterator[CheckResult]:
    """Run the stages one after another, and yield a result for every check, whatever hangs.

    Results come in the stages' order, each as soon as it is there. The context's
    deadline is that of all stages together. Each check runs in a thread, which is left
    behind if it hangs.
    """
    results: dict[str, CheckResult] = {}
    for number, stage in enumerate(stages, start=1):
        started = time.monotonic()
        seconds = (stage.fraction if number < len(stages) else 1.0) * (
            context.deadline - started
        )
        own = replace(context, deadline=started + seconds)
        futures: Futures = {check.name: Future() for check in stage.checks}
        for check in stage.checks:
            args = (check, own, futures, results)
            threading.Thread(target=_run_check, args=args, daemon=True).start()
        for check in stage.checks:
            try:
                result = futures[check.name].result(
                    max(0.0, own.deadline - time.monotonic())
                )
            except TimeoutError:
                result = _timed_out(check, futures, results, seconds)
            hint = None if result.hint is None else _readable(result.hint)
            result = replace(result, message=_readable(result.message), hint=hint)
            ours = replace(
                result, name=check.name, question=check.question, stage=stage.name
            )
            results[check.name] = ours
            yield results[check.name]


def _run_check(
    check: Check, context: Context, futures: Futures, earlier: Results
) -> None:
    try:
        result = _blocked(check, futures, earlier) or check.run(context)
    except Unavailable as error:
        result = failed(
            str(error), hint_for_error(error, "run it by hand to see what it says")
        )
    except BaseException as error:  # whatever it is, the others go on
        message = f"the check itself failed: {type(error).__name__}: {error}"
        hint = hint_for_output(message, f"this is a mistake of the doctor; {REPORT_IT}")
        result = failed(message, hint)
    futures[check.name].set_result(result)


def _blocked(check: Check, futures: Futures, earlier: Results) -> CheckResult | None:
    """Wait for the checks that this one needs; return why it is skipped, or None."""
    for name in check.needs:
        if name not in futures and name not in earlier:
            raise LookupError(
                f"{check.name!r} needs {name!r}, which is no check up to its stage"
            )
        result = futures[name].result() if name in futures else earlier[name]
        cause = name if result.status == "failed" else result.blocked_by
        if cause is not None:
            return skipped(f"{cause!r} failed, which it needs", blocked_by=cause)
    return None


def _timed_out(
    check: Check, futures: Futures, results: Results, seconds: float
) -> CheckResult:
    waiting = [
        name for name in check.needs if name in futures and not futures[name].done()
    ]
    if not waiting:
        return failed(f"no answer within {seconds:.0f} s", MORE_TIME)
    first = results.get(waiting[0])
    cause = (first and first.blocked_by) or waiting[0]
    message = f"{cause!r}, which it needs, had no answer within {seconds:.0f} s"
    return skipped(message, blocked_by=cause)


def _readable(text: str) -> str:
    """Return the text without control characters, which hosts may send, and not too long."""
    shown = printable(text, kept="\n").strip()
    return shown if len(shown) <= MAX_TEXT_LENGTH else f"{shown[:MAX_TEXT_LENGTH]} ..."
