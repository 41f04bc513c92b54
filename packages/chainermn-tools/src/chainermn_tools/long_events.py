"""Sends events of any length to `chainermn launch`: their longest texts lose their middle."""

from __future__ import annotations

import json
from typing import Any

import _chainermn_events
from _chainermn_events import MOST_BYTES

# The bytes of an event beside its fields: the mark, the job, the version, the kind and
# the rank.
BYTES_BESIDE = 256
# How many characters of an event's texts remain: the first number that makes the event
# short enough.
LONGEST_TEXTS = range(MOST_BYTES, 15, -20)


def emit(kind: str, **fields: Any) -> None:
    """Send an event about this rank, if `chainermn launch` started it; raise nothing."""
    _chainermn_events.emit(kind, **shortened(fields))


def shortened(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an event's fields, with shortened texts if the event is too long."""
    for most in LONGEST_TEXTS:
        short: dict[str, Any] = _shorten(fields, most)
        if len(json.dumps(short)) <= MOST_BYTES - BYTES_BESIDE:
            return short
    return fields


def _shorten(value: Any, most: int) -> Any:
    """Return a value of JSON whose texts have at most ``most`` characters, and three dots."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[: most // 2]}...{value[-(most // 2) :]}"
    if isinstance(value, dict):
        return {name: _shorten(each, most) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shorten(each, most) for each in value]
    return value
