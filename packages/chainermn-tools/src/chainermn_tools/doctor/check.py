"""What a check of the doctor is: a function with a name and a question, whose answer has a fix.

To add one, write a function and put it into its layer's tuple ``CHECKS``::

    @check("hyperspace", "Is the hyperspace drive on?", needs=("python",))
    def hyperspace(context: Context) -> Answer:
        if drive.is_on():
            return ok("it is on")
        return failed("it is off", "switch it on: hyperspace --on")
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from chainermn_tools.jobs import Host, assign_slots

# "warning": it works, but slower or less safely than it could. "skipped": there was nothing to
# look at, or no sense in looking since something that it needs has failed.
Status = Literal["ok", "warning", "failed", "skipped"]
# Programs of a check are told to end before the check's time is over, to be gone by then: so long
# before, but no more than this part of what is left.
ENDING_SECONDS, ENDING_SHARE = 3.0, 0.25


@dataclass(frozen=True)
class Answer:
    """What a check found; made by :func:`ok`, :func:`warning`, :func:`failed` or :func:`skipped`.

    Attributes:
        status: how good that is.
        found: what was found, in a sentence; nothing in it is secret.
        fix: the one thing to do first, a command where possible, in the style of
            ``command   # remark``; None when nothing is to be done.
        details: the same in numbers, for programs; what JSON can hold.
    """

    status: Status
    found: str
    fix: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def ok(found: str, **details: Any) -> Answer:
    """All is well."""
    return Answer("ok", found, None, details)


def warning(found: str, fix: str, **details: Any) -> Answer:
    """It works, but not as well as it could."""
    return Answer("warning", found, fix, details)


def failed(found: str, fix: str, **details: Any) -> Answer:
    """It doesn't work."""
    return Answer("failed", found, fix, details)


def skipped(found: str, **details: Any) -> Answer:
    """There is nothing to look at, for instance no GPU; that alone is no reason to complain."""
    return Answer("skipped", found, None, details)


@dataclass(frozen=True)
class Finding:
    """The answer of one check, with the check's name and question.

    Attributes:
        layer: of the check: ``"here"``, ``"live"`` or ``"hosts"``.
        name: of the check, unique among all layers.
        question: that the check asks.
        status: see :data:`Status`.
        found: see :class:`Answer`, as are ``fix`` and ``details``.
    """

    layer: str
    name: str
    question: str
    status: Status
    found: str
    fix: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What is to be examined, and until when. All checks of a layer share it, side by side.

    Attributes:
        deadline: of the layer, on ``time.monotonic()``'s clock.
        ranks: how many the user wants to run; None where they didn't say.
        hosts: that the user named; empty without any, and when the hostfile can't be understood.
        hostfile: its path as the user gave it; None without one.
        script: path of the script that the ranks are to run; None where the user didn't say.
        answers: of :meth:`once`; shared by all layers.
    """

    deadline: float
    ranks: int | None = None
    hosts: tuple[Host, ...] = ()
    hostfile: str | None = None
    script: str | None = None
    answers: dict[Any, _Once] = field(default_factory=dict)

    def left(self) -> float:
        """Seconds that a program may run which is started now, at least a tenth.

        It leaves time to end the program, so that a check that waits for no longer answers in time.
        """
        seconds = self.deadline - time.monotonic()
        return max(0.1, seconds - min(ENDING_SECONDS, ENDING_SHARE * seconds))

    def ranks_here(self) -> int | None:
        """How many ranks this machine is to run; None where nobody said, and where others run."""
        if not self.hosts:
            return self.ranks
        own = {"localhost", socket.gethostname().split(".")[0]}
        mine = any(host.name.split(".")[0] in own for host in self.hosts)
        return self.ranks_a_host() if mine else None

    def ranks_a_host(self) -> int | None:
        """The most ranks that any of the machines is to run; None where nobody said."""
        if not self.hosts:
            return self.ranks
        try:
            return max(assign_slots(self.hosts, self.ranks).values())
        except ValueError:  # they don't fit; a check over the hosts says so
            return max(host.slots or 1 for host in self.hosts)

    def once(self, ask: Callable[[Context], Any]) -> Any:
        """``ask(self)``, asked by whoever comes first and answered to all checks alike.

        Args:
            ask: a function at the top level of a module.

        Raises:
            Exception: what ``ask`` raised, for all that ask.
        """
        # setdefault of a dict is atomic, so that all threads get the same one.
        return self.answers.setdefault(ask, _Once())(ask, self)


class _Once:
    """The outcome of a function that is called once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: tuple[Any, Exception | None] | None = None

    def __call__(self, ask: Callable[[Context], Any], context: Context) -> Any:
        with self._lock:
            if self._outcome is None:
                try:
                    self._outcome = (ask(context), None)
                except Exception as problem:
                    self._outcome = (None, problem)
        answer, raised = self._outcome
        if raised is not None:
            raise raised
        return answer


@dataclass(frozen=True)
class Check:
    """A function that answers one question.

    Attributes:
        name: unique among all layers; what JSON and people call it.
        question: that it asks, in words of the user.
        look: does the work. It may raise, and hang; the others go on.
        needs: names of checks of this layer or one before it, without whose success there is no
            sense in looking: it is skipped when one of them failed, and begins when all are done.
    """

    name: str
    question: str
    look: Callable[[Context], Answer]
    needs: tuple[str, ...] = ()


def check(
    name: str, question: str, needs: tuple[str, ...] = ()
) -> Callable[[Callable[[Context], Answer]], Check]:
    """Make a :class:`Check` of a function."""
    return lambda look: Check(name, question, look, needs)
