"""Signals that would end this process: collected, or raised so that clean-up runs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNAL_NAMES = {one.value: one.name for one in signal.Signals}


@contextlib.contextmanager
def capture_signals() -> Iterator[list[int]]:
    """Let the signals only go into the list that is given (main thread only)."""
    captured: list[int] = []
    with _handle_signals(captured.append):
        yield captured


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let the signals raise SystemExit (main thread only)."""

    def leave(number: int) -> NoReturn:
        raise SystemExit(128 + number)

    with _handle_signals(leave):
        yield


@contextlib.contextmanager
def _handle_signals(handle: Callable[[int], None]) -> Iterator[None]:
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
