"""Any picklable value as two arrays of bytes: a batch is one message, not one for each image."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

# Where arrays begin in the data: a multiple of every item size, and of a cache line.
_ALIGNMENT = 64


def pack(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the header of a value and the data of all arrays in it, both uint8 and 1-D."""
    found: list[pickle.PickleBuffer] = []
    text = pickle.dumps(value, protocol=5, buffer_callback=found.append)
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in found]
    spans: list[tuple[int, int]] = []
    end = 0
    for array in arrays:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + array.size
        spans.append((begin, end))
    data = np.empty(end, np.uint8)
    for (begin, end), array in zip(spans, arrays, strict=True):
        data[begin:end] = array
    return np.frombuffer(pickle.dumps((text, spans)), np.uint8), data


def unpack(header: np.ndarray, data: np.ndarray) -> Any:
    """Return the value; its arrays are parts of ``data``, not copies."""
    text, spans = pickle.loads(header.tobytes())
    view = data.data
    return pickle.loads(text, buffers=[view[begin:end] for begin, end in spans])
