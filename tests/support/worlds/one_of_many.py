"""One of many ranks, that never gets an answer: only the room it makes for the others counts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def rank_1_of(size: int) -> Any:
    """What stands in for a communicator of so many ranks."""
    comm: Any = SimpleNamespace(rank=1, size=size, Dup=lambda: comm)
    return comm


def most_bytes(call: Callable[[], object]) -> int:
    """The most that NumPy held during a call, beside what it held before."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - before
