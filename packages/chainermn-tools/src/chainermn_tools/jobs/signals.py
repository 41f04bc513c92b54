"""Signals that would end this process, handled so that clean-up runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
# The signals by which a scheduler warns of a near end.
WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
SIGNAL_NAMES = {one.value: one.name for one in signal.Signals}


@contextlib.contextmanager
def handle_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Let signals only call this function with their number (main thread only)."""
    with contextlib.ExitStack() as stack:
        for number in SIGNALS:
            before = signal.getsignal(number)
            # An ignored signal stays ignored, such as nohup's, or a background job's.
            if before not in (signal.SIG_IGN, None):
                signal.signal(number, lambda number, _: handle(number))
                stack.callback(signal.signal, number, before)
        yield
