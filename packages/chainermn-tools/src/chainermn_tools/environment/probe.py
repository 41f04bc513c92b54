"""Runs probes concurrently, each with a timeout, so that they always end.

A probe that loads foreign libraries (MPI, CUDA, a BLAS) may hang or crash, so it runs
in a subprocess. A probe that only reads files runs in a thread, which is left behind if
it hangs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from chainermn_tools.jobs import (
    DYING_WITH_PARENT,
    Unavailable,
    check_output,
    quote_output,
)

# How many times its own time-out a subprocess may take, including its start and the
# scheduling of its thread.
MARGIN = 1.25
# A subprocess prints its answer after this mark, since libraries may print, too.
MARK = "chainermn-answer:"
Answer = TypeVar("Answer")


def unavailable(reason: str | BaseException) -> dict[str, str]:
    """Return the entry of a report that has no answer: the reason, on one line."""
    text = str(reason)
    if not isinstance(reason, str | Unavailable):
        text = f"{type(reason).__name__}: {text}"
    return {"unavailable": " ".join(text.split())}


def run_concurrently(
    probes: Mapping[str, Callable[[], Any]], timeout: float
) -> dict[str, Any]:
    """Run probes, which return values for JSON, concurrently for ``timeout`` seconds.

    The result has under each name, in the given order, the answer, or ``{"unavailable":
    reason}`` if the probe raised or has not finished. Never raise.
    """
    answers: dict[str, Any] = {}

    def run(name: str, probe: Callable[[], Any]) -> None:
        try:
            answers[name] = probe()
        except (
            BaseException
        ) as error:  # a broken package may raise anything, SystemExit too
            answers[name] = unavailable(error)

    deadline = time.monotonic() + timeout
    threads = [
        threading.Thread(target=run, args=item, daemon=True) for item in probes.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = unavailable(f"no answer within {timeout:g} s")
    return {name: answers.get(name, late) for name in probes}


def call_in_subprocess(function: Callable[[], Answer | None], timeout: float) -> Answer:
    """Call a function in a fresh Python process, and return what it returned.

    The function is at the top level of a module, takes no argument, and returns a value
    for JSON, or None if another rank answers. Raise TimedOut if the call took too long,
    and Unavailable if it raised, crashed or gave no answer.
    """
    # `-c` puts the current folder first on the path, which the command `chainermn` does
    # not.
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]\n"
        f"from {__name__} import print_answer\n"
        f"from {function.__module__} import {function.__qualname__} as function\n"
        "print_answer(function)"
    )
    # A launcher may kill this process, which is a rank.
    command = [*DYING_WITH_PARENT, str(os.getpid()), sys.executable, "-c", code]
    text = check_output(command, timeout)
    for line in text.splitlines():
        if line.startswith(MARK):
            found = json.loads(line.removeprefix(MARK))
            if "unavailable" in found:
                raise Unavailable(found["unavailable"])
            answer: Answer = found["answer"]
            return answer
    raise Unavailable(f"the process gave no answer{quote_output(text)}")


def print_answer(function: Callable[[], Any]) -> None:
    """Print what the function returns, for :func:`call_in_subprocess` on the other side to read."""
    try:
        found = {"answer": function()}
    except Exception as error:
        found = unavailable(error)
    if found.get("answer", ...) is not None:
        # One write: in one piece, and on a line of its own even if something was
        # printed before.
        sys.stdout.flush()
        os.write(1, f"\n{MARK}{json.dumps(found)}\n".encode())
