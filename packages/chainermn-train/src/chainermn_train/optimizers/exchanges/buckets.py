"""Buckets of arrays that travel together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A bucket is large enough that its fixed costs don't count, and small enough that the
# first bucket leaves early.
BUCKET_BYTES = 1 << 20


def bounds_of(arrays: Sequence[Any]) -> list[int]:
    """Return where buckets begin in a list of arrays, and its length."""
    bounds = [0]
    room = BUCKET_BYTES
    for number, array in enumerate(arrays):
        if number > 0 and array.nbytes > room:
            bounds.append(number)
            room = BUCKET_BYTES
        room -= array.nbytes
    return [*bounds, len(arrays)]
