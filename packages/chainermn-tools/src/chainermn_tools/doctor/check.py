"""What a check of the doctor is, what it returns, and what it may ask of its context."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from chainermn_tools.jobs import Host, assign_slots

# "warning": it works, but slower or less safely than it could. "skipped": there was
# nothing to check, or no point in checking since something that the check needs has
# failed.
Status = Literal["ok", "warning", "failed", "skipped"]
Result = TypeVar("Result")
# Programs of a check are ended before the check's deadline, so that they are gone by
# then: this many seconds before, but no more than this share of the remaining time.
CLEANUP_SECONDS, CLEANUP_SHARE = 3.0, 0.25
# What one small program may take: loading MPI or CUDA from a cold network disk is slow.
PROGRAM_SECONDS, PROGRAM_SHARE = 30.0, 0.5


@dataclass(frozen=True)
class CheckResult:
    """What a check found; made by `ok`, `warning`, `failed` or `skipped`."""

    status: Status
    message: str  # what was found, in a sentence; nothing in it is secret
    # The one thing to do first, a command where possible, in the style of ``command   # remark``;
    # None when nothing is to be done.
    hint: str | None = None
    # For programs; what JSON can hold.
    details: dict[str, Any] = field(default_factory=dict)
    # The failed check for whose sake this one was skipped.
    blocked_by: str | None = None
    # Filled in as the checks are run: of the check, and the name of its stage.
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
    """There was nothing to check, for instance no GPU, or a check that this one needs failed."""
    return CheckResult("skipped", message, blocked_by=blocked_by)


@dataclass(frozen=True)
class Context:
    """What is to be examined, and until when; shared by the checks of a stage."""

    deadline: float  # of the stage, on ``time.monotonic()``'s clock
    # How many the user wants to run; None where they didn't say.
    ranks: int | None = None
    # Empty without any, and when the hostfile can't be parsed.
    hosts: tuple[Host, ...] = ()
    hostfile: str | None = None  # its path as the user gave it
    # Absolute path of the script that the ranks are to run, if said.
    script: str | None = None
    cache: dict[Any, Future[Any]] = field(default_factory=dict)  # shared by all stages

    @staticmethod
    def cached(function: Callable[[Context], Result]) -> Callable[[Context], Result]:
        """Let a function be called once for all checks: each gets what it returned or raised."""

        @functools.wraps(function)
        def call(context: Context) -> Result:
            mine: Future[Result] = Future()
            # setdefault of a dict is atomic, so that all threads get the same one.
            future: Future[Result] = context.cache.setdefault(call, mine)
            if future is mine:
                try:
                    future.set_result(function(context))
                except Exception as error:
                    future.set_exception(error)
            return future.result()

        return call

    def remaining(self) -> float:
        """Return for how many seconds a program may run, leaving time to end it; at least 0.1."""
        seconds = self.deadline - time.monotonic()
        return max(0.1, seconds - min(CLEANUP_SECONDS, CLEANUP_SHARE * seconds))

    def program_timeout(self) -> float:
        return round(self.time_for(PROGRAM_SECONDS, PROGRAM_SHARE), 1)

    def time_for(self, usual: float, share: float, max_share: float = 1.0) -> float:
        """Return how long a part of a check may take, in seconds; more with a longer time-out.

        It gets the usual seconds, or this share of the remaining time if that is
        longer, and never more than ``max_share`` of it.
        """
        remaining = self.remaining()
        return min(max_share * remaining, max(usual, share * remaining))

    def local_ranks(self) -> int | None:
        """Return how many ranks this machine is to run; None if unknown, or if others run them."""
        own = {"localhost", socket.gethostname().split(".")[0]}
        is_here = not self.hosts or any(
            host.name.split(".")[0] in own for host in self.hosts
        )
        return self.max_ranks_per_host() if is_here else None

    def max_ranks_per_host(self) -> int | None:
        """Return the most ranks that any of the machines is to run; None if unknown."""
        if not self.hosts:
            return self.ranks
        try:
            return max(assign_slots(self.hosts, self.ranks).values())
        except ValueError:  # they don't fit; a check of the cluster says so
            return max(host.slots or 1 for host in self.hosts)


Run = Callable[[Context], CheckResult]


@dataclass(frozen=True)
class Check:
    """A function that answers one question."""

    name: str  # unique among all stages; what JSON and people call it
    question: str  # in the user's words
    run: Run  # it may raise and hang; the others go on
    # Names of checks of this stage or an earlier one without whose success this one has
    # no point: it is skipped when one of them failed, and starts when all have
    # finished.
    needs: tuple[str, ...] = ()


class Checks(list[Check]):
    """The checks of one file, in the order in which they stand there and are shown."""

    def add(
        self, name: str, question: str, needs: tuple[str, ...] = ()
    ) -> Callable[[Run], Check]:

        def register(run: Run) -> Check:
            self.append(Check(name, question, run, needs))
            return self[-1]

        return register
