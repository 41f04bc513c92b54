"""Signals that would end this process: collected, or raised so that clean-up runs."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# By which a scheduler warns of an end that is near.
WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
SIGNAL_NAMES = {one.value: one.name for one in signal.Signals}


def exit_on_signals() -> contextlib.AbstractContextManager[None]:
    """Let the signals raise SystemExit (main thread only)."""
    return handle_signals(lambda number: sys.exit(128 + number))


@contextlib.contextmanager
def handle_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Let the signals only call this with their number (main thread only)."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Those that are ignored stay so: nohup's, or a background job's.
    ours = [number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)]
    for number in ours:
        signal.signal(number, lambda number, _: handle(number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
