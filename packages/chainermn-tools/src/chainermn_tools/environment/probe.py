"""Questions that always end: probes run side by side, each with a limit in seconds.

What loads foreign libraries (MPI, CUDA, a BLAS) may hang or crash, so it runs in a child
process. What merely reads files runs in a thread, which is left behind if it hangs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chainermn_tools import program

# What thread scheduling and starting a child may add to the child's own limit.
MARGIN_SECONDS = 5.0
# A child prints its answer after this mark, since libraries may print things of their own.
MARK = "chainermn-answer:"
# Characters of a failed command's output that are quoted: a launcher says what is wrong first,
# a Python traceback last.
QUOTED_FIRST, QUOTED_LAST = 200, 200


class Unavailable(Exception):
    """A probe has no answer; the message says why."""


class TimedOut(Unavailable):
    """What a probe ran had to be ended: it hangs, or the machine is slow."""


def unavailable(reason: str) -> dict[str, str]:
    """What a report holds in place of an answer; the reason on one line."""
    return {"unavailable": " ".join(reason.split())}


def together(probes: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, Any]:
    """Run all probes at once.

    Args:
        probes: functions that return something that JSON can hold.
        seconds: when to stop waiting.

    Returns:
        Under each name, in the order given, the answer, or ``{"unavailable": reason}`` when
        the probe raised or is not done yet. Never raises.
    """
    answers: dict[str, Any] = {}

    def ask(name: str, probe: Callable[[], Any]) -> None:
        try:
            answers[name] = probe()
        except Unavailable as problem:
            answers[name] = unavailable(str(problem))
        except BaseException as problem:  # a broken package may raise anything, SystemExit too
            answers[name] = unavailable(f"{type(problem).__name__}: {problem}")

    end = time.monotonic() + seconds
    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in probes.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = unavailable(f"no answer within {seconds:g} s")
    return {name: answers.get(name, late) for name in probes}


def run(command: Sequence[str], seconds: float) -> str:
    """Run a command to its end.

    Args:
        command: the program and its arguments.
        seconds: after this long the command and all it started are ended.

    Returns:
        What it printed, both streams together.

    Raises:
        TimedOut: it took too long.
        Unavailable: it could not be started, failed or crashed.
    """
    name = os.path.basename(command[0])
    try:
        ended = program.run(command, seconds, merged=True)
    except OSError as problem:
        raise Unavailable(f"{command[0]} does not start: {problem.strerror}") from None
    if ended.status is None:
        raise TimedOut(f"{name} did not end within {seconds:g} s")
    if ended.status:
        raise Unavailable(f"{name} {_how_it_ended(ended.status)}{_quote(ended.out)}")
    return ended.out


def in_child(function: Callable[[], Any], seconds: float, *launcher: str) -> Any:
    """Call a function in a fresh Python process.

    Args:
        function: at the top level of a module; it takes nothing and returns what JSON can hold,
            or None when another rank of ``launcher`` answers.
        seconds: limit of the process.
        launcher: command line that comes before Python's, such as ``mpiexec -n 2``.

    Returns:
        What the function returned.

    Raises:
        TimedOut: it took too long.
        Unavailable: it raised, crashed or gave no answer.
    """
    # `-c` puts the current folder first on the path, which the command `chainermn` does not.
    code = (
        "import sys; sys.path[:] = [p for p in sys.path if p]\n"
        f"from chainermn_tools.environment.probe import answer\n"
        f"from {function.__module__} import {function.__qualname__} as function\n"
        "answer(function)"
    )
    text = run([*launcher, sys.executable, "-c", code], seconds)
    for line in text.splitlines():
        if line.startswith(MARK):
            found = json.loads(line.removeprefix(MARK))
            if "unavailable" in found:
                raise Unavailable(found["unavailable"])
            return found["answer"]
    raise Unavailable(f"the process gave no answer{_quote(text)}")


def answer(function: Callable[[], Any]) -> None:
    """Print what the function returns, for :func:`in_child` on the other side to read."""
    try:
        found = {"answer": function()}
    except Unavailable as problem:
        found = unavailable(str(problem))
    except Exception as problem:
        found = unavailable(f"{type(problem).__name__}: {problem}")
    if found.get("answer", ...) is not None:
        # One write, in one piece and on its own line even if something was printed before.
        sys.stdout.flush()
        os.write(1, f"\n{MARK}{json.dumps(found)}\n".encode())


def _how_it_ended(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"crashed ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashed (signal {-code})"


def _quote(text: str) -> str:
    """Some output on one line, shortened, after a colon; empty when there was none."""
    words = " ".join(word for word in text.split() if set(word) - set("-=*#"))
    if not words:
        return ""
    if len(words) <= QUOTED_FIRST + QUOTED_LAST:
        return f": {words}"
    return f": {words[:QUOTED_FIRST]} ... {words[-QUOTED_LAST:]}"
