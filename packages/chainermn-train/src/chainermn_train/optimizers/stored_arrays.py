"""Arrays of parameters in a snapshot: gradients, their sums, and master weights."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import chainer
import numpy as np


class StoredArray(NamedTuple):
    """An array that belongs to a parameter."""

    name: str  # the parameter's path
    scale: float | None  # the loss scale that it was computed with
    array: Any  # None if there is none


def serialize_arrays(serializer: Any, rows: list[StoredArray]) -> list[StoredArray]:
    """Save these, or load others; return those that were saved or loaded."""
    if not isinstance(serializer, chainer.serializer.Deserializer):
        heads = [[row.name, row.scale, row.array is not None] for row in rows]
        serializer("names", np.frombuffer(json.dumps(heads).encode(), np.uint8))
        for number, row in enumerate(rows):
            if row.array is not None:
                serializer(str(number), row.array)
        return rows
    text = serializer("names", None)
    heads = [] if text is None else json.loads(np.asarray(text).tobytes())
    return [
        StoredArray(name, scale, serializer(str(number), None) if present else None)
        for number, (name, scale, present) in enumerate(heads)
    ]
