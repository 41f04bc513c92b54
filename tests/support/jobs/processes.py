"""Waits for what other processes do, without saying how fast they must be."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Ends a hang, no more: what is waited for takes a moment, or minutes on a busy machine.
TIMEOUT_SECONDS = 120.0


def soon(
    condition: Callable[[], Any], seconds: float = TIMEOUT_SECONDS, pause: float = 0.02
) -> Any:
    """Wait until `condition()` is true, and return its value; the last one if it never is."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process, and not just its exit status."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        state = text.rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def is_gone(pid: int) -> bool:
    """Whether the process has ended, or does soon."""
    return bool(soon(lambda: not is_running(pid)))
