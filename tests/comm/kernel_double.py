"""What the kernels of `chainermn_comm.kernels` do, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

WIRES = {"e": "f2", "f": "f4", "d": "f8"}


def cast(values: np.ndarray, dtype: Any, divisor: float = 1.0) -> np.ndarray:
    """Divide in float32, or in float64 where either side has it, and round once."""
    wide = np.promote_types(np.promote_types(values.dtype, dtype), np.float32)
    with np.errstate(all="ignore"):
        return (values.astype(wide) / wide.type(divisor)).astype(dtype)


def run_kernel(
    name: str,
    bytes_at: Callable[[int, int], np.ndarray],
    table: int,
    count: int,
    buffer: int,
    size: int,
    divisor: float,
) -> None:
    """Run the kernel of that name on memory that ``bytes_at`` gives for (address, bytes)."""
    verb, _, letter = name.partition("_")
    wire = bytes_at(buffer, size * np.dtype(WIRES[letter]).itemsize).view(WIRES[letter])
    rows = bytes_at(table, (count + 1) * 24).view(np.int64).reshape(-1, 3)
    assert rows[0, 0] == 0
    assert rows[count, 0] == size
    for (begin, address, itemsize), end in zip(rows[:count], rows[1:, 0], strict=True):
        if end > begin:
            grad = bytes_at(int(address), int((end - begin) * itemsize)).view(f"f{itemsize}")
            if verb == "pack":
                wire[begin:end] = cast(grad, wire.dtype, divisor)
            else:
                grad[...] = cast(wire[begin:end], grad.dtype)
