"""Runs the checks, each under what is left of one time-out, and gives a finding for every one."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from chainermn_tools.doctor.advice import MORE_TIME, about, advice
from chainermn_tools.doctor.check import Answer, Check, Context, Finding, failed, skipped
from chainermn_tools.formatting import printable
from chainermn_tools.jobs import Unavailable

LONGEST_TEXT = 2000
REPORT_IT = "this is a mistake of the doctor; please report it: chainermn doctor --report"


@dataclass(frozen=True)
class Layer:
    """Checks that are run together.

    Attributes:
        name: what JSON calls it.
        title: what people read.
        checks: in the order in which they are shown.
        share: of the time that is left, how much the layer may take; the last takes all.
    """

    name: str
    title: str
    checks: tuple[Check, ...]
    share: float


def examine(layers: Sequence[Layer], context: Context) -> Iterator[Finding]:
    """Run the layers one after another, and the checks of each side by side.

    Args:
        layers: of which names of checks are unique.
        context: whose deadline is that of all layers together.

    Yields:
        A finding for every check, in the layers' order, each as soon as it is there.
    """
    done: dict[str, Answer] = {}
    for number, layer in enumerate(layers, start=1):
        left = context.deadline - time.monotonic()
        share = layer.share if number < len(layers) else 1.0
        run = _Run(done, dataclasses.replace(context, deadline=time.monotonic() + share * left))
        for check in layer.checks:
            run.expect(check)
        for check in layer.checks:
            run.start(check)
        for check in layer.checks:
            answer = run.answer(check, done)
            done[check.name] = answer
            yield Finding(
                layer.name,
                check.name,
                check.question,
                answer.status,
                _readable(answer.found),
                None if answer.fix is None else _readable(answer.fix),
                answer.details,
            )


class _Run:
    """The checks of one layer while they run, each in a thread that is left behind if it hangs."""

    def __init__(self, before: dict[str, Answer], context: Context) -> None:
        self._before, self._context = before, context
        self._began = time.monotonic()
        self._answers: dict[str, Answer] = dict(before)
        self._done: dict[str, threading.Event] = {}

    def expect(self, check: Check) -> None:
        """Others may need the check, before it has started too."""
        self._done[check.name] = threading.Event()

    def start(self, check: Check) -> None:
        threading.Thread(target=self._carry_out, args=(check,), daemon=True).start()

    def answer(self, check: Check, given: Mapping[str, Answer]) -> Answer:
        """The check's answer; at the deadline, what is to be said in its place.

        Args:
            check: one that was started.
            given: the answers of this method so far, and of the layers before.
        """
        if self._done[check.name].wait(max(0.0, self._context.deadline - time.monotonic())):
            return self._answers[check.name]
        seconds = self._context.deadline - self._began
        waiting = [name for name in check.needs if name not in self._answers]
        if waiting:
            first = given.get(waiting[0])
            cause = waiting[0] if first is None else first.details.get("because", waiting[0])
            said = f"{cause!r}, which it needs, had no answer within {seconds:.0f} s"
            return skipped(said, because=cause)
        return failed(f"no answer within {seconds:.0f} s", MORE_TIME)

    def _carry_out(self, check: Check) -> None:
        try:
            self._answers[check.name] = self._refused(check) or check.look(self._context)
        except Unavailable as problem:
            fix = about(problem, "run it by hand to see what it says")
            self._answers[check.name] = failed(str(problem), fix)
        except BaseException as problem:  # whatever it is, the others go on
            said = f"the check itself failed: {type(problem).__name__}: {problem}"
            self._answers[check.name] = failed(said, advice(said, REPORT_IT))
        finally:
            self._done[check.name].set()

    def _refused(self, check: Check) -> Answer | None:
        """Why there is no sense in looking; None when there is."""
        for name in check.needs:
            if name in self._done:
                self._done[name].wait()
            elif name not in self._answers:
                raise LookupError(
                    f"{check.name!r} needs {name!r}, which is no check up to its layer"
                )
            answer = self._answers[name]
            if answer.status == "failed":
                return skipped(f"{name!r} failed, which it needs", because=name)
            if "because" in answer.details:
                cause = answer.details["because"]
                return skipped(f"{cause!r} failed, which it needs", because=cause)
        return None


def _readable(text: str) -> str:
    """Without control characters, which programs and hosts may send, and not too long."""
    shown = printable(text, kept="\n").strip()
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]} ..."
