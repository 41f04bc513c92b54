"""Signals that would end this process, handled so that clean-up runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# By which a scheduler warns of an end that is near.
WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
SIGNAL_NAMES = {one.value: one.name for one in signal.Signals}


@contextlib.contextmanager
def handle_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Let the signals only call this with their number (main thread only)."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Those that are ignored stay so: nohup's, or a background job's.
    ours = [
        number for number in SIGNALS if before[number] not in (signal.SIG_IGN, None)
    ]
    for number in ours:
        signal.signal(number, lambda number, _: handle(number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
