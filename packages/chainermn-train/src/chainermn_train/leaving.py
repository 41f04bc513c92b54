"""The signals by which a scheduler warns that a job is about to end.

A trainer with a checkpointer then saves and leaves. The multi-node optimizer passes
the warning on to the other ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from _chainermn_events import (
    GRACE_SECONDS,
    GRACE_VARIABLE,
    LEAVING_STATUS,
    emit,
    pass_warning_on,
)
from chainermn_comm import CommunicatorBase
from chainermn_comm.environment import seconds
from chainermn_comm.faults import leave

# The handlers after training, when no code acts on a warning any more. SIGTERM ends the
# process again. SIGUSR1 is ignored until the process has ended, because it only warns
# of the end.
SIGNALS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGUSR1: signal.SIG_IGN}
# A scheduler and a launcher may both send a signal: two signals so close together are one.
ECHO_SECONDS = 0.5

_warned_at: float | None = None
# The timer that ends this process after a warning.
_timer: threading.Timer | None = None
_process: int | None = None  # the listening process, but not its forks


def listen() -> None:
    """Note SIGTERM and SIGUSR1 from now on, unless the user handles them (main thread only).

    A second signal ends this process at once. Without a second signal the process is ended
    after CHAINERMN_GRACE seconds, by default 30.
    """
    global _process
    has_listened = _process is not None
    _process = os.getpid()
    if _is_main_thread():
        for number, late in SIGNALS.items():
            handler = signal.getsignal(number)
            was_ours = has_listened and handler is late
            if was_ours or handler in (signal.SIG_DFL, pass_warning_on):
                signal.signal(number, _handle)


def stop_listening() -> None:
    """Forget a warning: nobody acts on it (main thread only)."""
    global _warned_at
    _warned_at = None
    if _timer is not None:
        _timer.cancel()
    if _is_main_thread():
        for number, late in SIGNALS.items():
            if signal.getsignal(number) is _handle:
                signal.signal(number, late)


def is_warned() -> bool:
    """Return whether a signal has warned this process."""
    return _warned_at is not None


def leave_when_warned(
    trainer: Any, comm: CommunicatorBase, save: Callable[[Any], None], priority: int
) -> None:
    """Let a trainer ``save`` and end on all ranks after an iteration in which a rank was warned.

    The function isn't collective, but the extension that it adds with this ``priority``
    is. The process calls :func:`listen`, and stops listening when the trainer has run.
    """
    listen()
    agreements_before = 0

    def leave_if_warned(trainer: Any) -> None:
        nonlocal agreements_before
        optimizers = [
            each
            for each in trainer.updater.get_all_optimizers().values()
            if hasattr(each, "is_warned")
        ]
        own = [each for each in optimizers if each.communicator is comm]
        agreements = sum([each.agreements for each in own])
        if agreements != agreements_before:
            # An update of this iteration has told all ranks.
            leaves = any([each.is_warned for each in own])
        else:
            knows = is_warned()
            if len(optimizers) > len(own):
                # A warning that no update has passed on yet waits for the next update, in
                # which other ranks than these may take part.
                knows = any([each.is_warned for each in optimizers])
            rows = comm.handshake("leave", payload=bytes([knows]))
            leaves = any(map(any, rows))
        agreements_before = agreements
        if not leaves:
            return
        save(trainer)
        if comm.rank == 0:
            print(
                "chainermn: a signal warned of the end; saved iteration "
                f"{trainer.updater.iteration}, and all ranks leave with exit status "
                f"{LEAVING_STATUS}",
                file=sys.stderr,
                flush=True,
            )
        emit("leaving")
        leave(LEAVING_STATUS)

    leave_if_warned.finalize = stop_listening  # type: ignore[attr-defined]
    # A trigger without state is in no checkpoint.
    trainer.extend(leave_if_warned, "leave", lambda _: True, priority)


def grace_seconds() -> float:
    """Return how long a process may go on after a warning."""
    return seconds(GRACE_VARIABLE, GRACE_SECONDS)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle(number: int, _: FrameType | None) -> None:
    global _warned_at, _timer
    now = time.monotonic()
    if os.getpid() != _process:
        _end(number)
    elif _warned_at is None:
        _warned_at = now
        _timer = threading.Timer(grace_seconds(), _end, [number])
        _timer.daemon = True
        _timer.start()
    elif now - _warned_at > ECHO_SECONDS:
        _end(number)


def _end(number: int) -> None:
    """End this process, in its main thread as by this signal that nobody handles."""
    if _is_main_thread():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGKILL)
