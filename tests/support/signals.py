"""SIGINT for children: a runner in a shell's background has it ignored, and they would, too."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Processes that are started in the block have SIGINT's default action."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # no handler is inherited
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
