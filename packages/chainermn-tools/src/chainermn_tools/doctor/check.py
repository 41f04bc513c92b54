"""The doctor's checks, their results, and the context that they may use."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from chainermn_tools import environment
from chainermn_tools.jobs import Host, assign_slots, is_here

# "warning": all works, but slower or less safely than it could. "skipped": there was
# nothing to check, or a check has failed that must succeed before.
Status = Literal["ok", "warning", "failed", "skipped"]
# Programs are ended some seconds before the deadline, so that they are gone by then,
# but these seconds are at most this share of the remaining time.
CLEANUP_SECONDS = 3.0
CLEANUP_SHARE = 0.25
# The share of the remaining time for a program that is asked for facts.
FACTS_SHARE = 0.3
MAX_LOOKUPS = 32  # look-ups of hosts' names at the same time
DEFAULT_RANKS = 2  # the smallest number of ranks that can find one another


@dataclass(frozen=True)
class CheckResult:
    """What a check found; made by `ok`, `warning`, `failed` or `skipped`."""

    status: Status
    message: str  # the finding, in a sentence without secrets
    # The one thing to do first, if possible a command, as ``command # remark``; None if
    # there is nothing to do.
    hint: str | None = None
    # Values for programs, in types of JSON.
    details: dict[str, Any] = field(default_factory=dict)
    # The failed check because of which this one was skipped.
    blocked_by: str | None = None
    # Set when the check has run: its name and question, and the name of its stage.
    name: str = ""
    question: str = ""
    stage: str = ""


def ok(message: str, **details: Any) -> CheckResult:
    return CheckResult("ok", message, None, details)


def warning(message: str, hint: str, **details: Any) -> CheckResult:
    return CheckResult("warning", message, hint, details)


def failed(message: str, hint: str, **details: Any) -> CheckResult:
    return CheckResult("failed", message, hint, details)


def skipped(message: str, blocked_by: str | None = None) -> CheckResult:
    """There was nothing to check, or a check has failed that must succeed before."""
    return CheckResult("skipped", message, blocked_by=blocked_by)


@dataclass(eq=False)  # compared by identity, as the key of cached results
class Context:
    """What all checks share: the job that the user wants to run, the deadline, and facts."""

    deadline: float  # on ``time.monotonic()``'s clock
    # The number of ranks that the user wants to run; None if the user didn't say.
    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    # The absolute path of the script that the ranks shall run, if given.
    script: str | None = None

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The facts that `chainermn env` prints."""
        return environment.collect(round(self.share(FACTS_SHARE), 1))

    def share(self, share: float) -> float:
        """Return this share of the remaining seconds, minus the time to end a program."""
        seconds = self.deadline - time.monotonic()
        cleanup = min(CLEANUP_SECONDS, CLEANUP_SHARE * seconds)
        return max(0.1, share * (seconds - cleanup))

    def local_ranks(self) -> int | None:
        """Return how many ranks this machine shall run; None if unknown, or if others run them."""
        if self.hosts:
            names = [host.name for host in self.hosts]
            with ThreadPoolExecutor(MAX_LOOKUPS) as pool:
                if not any(pool.map(is_here, names)):
                    return None
        return self.max_ranks_per_host()

    def max_ranks_per_host(self) -> int | None:
        """Return the largest number of ranks that a machine shall run; None if unknown."""
        if not self.hosts:
            return self.ranks
        try:
            return max(assign_slots(self.hosts, self.ranks).values())
        except ValueError:  # the ranks don't fit, which another check reports
            return max(host.slots or 1 for host in self.hosts)


Run = Callable[[Context], CheckResult]


@dataclass(frozen=True)
class Check:
    """A function that answers one question."""

    name: str  # the name for JSON and people, unique among all stages
    question: str  # in the user's words
    run: Run  # the function may raise
    # The names of earlier checks that must succeed before this check makes sense.
    needs: tuple[str, ...] = ()


class Checks(list[Check]):
    """The checks of one file, in the file's order, in which they are also shown."""

    def add(
        self, name: str, question: str, needs: tuple[str, ...] = ()
    ) -> Callable[[Run], Check]:

        def register(run: Run) -> Check:
            self.append(Check(name, question, run, needs))
            return self[-1]

        return register
