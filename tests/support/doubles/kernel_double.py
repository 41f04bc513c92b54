"""What the kernels of `chainermn_comm.gpu.kernels` do, in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# Bits of bfloat16 lie in uint16.
WIRE_DTYPES = {"e": "f2", "f": "f4", "d": "f8", "b": "u2"}


def cast(values: np.ndarray, dtype: Any, divisor: float = 1.0) -> np.ndarray:
    """Divide in float32, or in float64 where either side has it, and round once."""
    if values.dtype == np.uint16:
        values = from_bfloat16(values)
    target = np.dtype(np.float32) if dtype == np.uint16 else np.dtype(dtype)
    wide = np.promote_types(np.promote_types(values.dtype, target), np.float32)
    with np.errstate(all="ignore"):
        result = (values.astype(wide) / wide.type(divisor)).astype(target)
    return to_bfloat16(result) if dtype == np.uint16 else result


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 numbers, given by their bits (uint16), as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits (uint16) of the bfloat16 next to each float32, the even one of two."""
    lower = values.view(np.uint32) >> np.uint32(16)  # rounded towards zero
    rest = values.view(np.uint32) & np.uint32(0xFFFF)
    up = (rest > 0x8000) | ((rest == 0x8000) & (lower % 2 == 1))
    bits = np.where(np.isnan(values), lower | np.uint32(0x40), lower + up)
    return bits.astype(np.uint16)


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
    operation, _, letter = name.partition("_")
    wire = bytes_at(buffer, size * np.dtype(WIRE_DTYPES[letter]).itemsize).view(
        WIRE_DTYPES[letter]
    )
    rows = bytes_at(table, (count + 1) * 24).view(np.int64).reshape(-1, 3)
    assert rows[0, 0] == 0
    assert rows[count, 0] == size
    for (begin, address, itemsize), end in zip(rows[:count], rows[1:, 0], strict=True):
        if end > begin:
            grad = bytes_at(int(address), int((end - begin) * itemsize)).view(
                f"f{itemsize}"
            )
            if operation == "pack":
                wire[begin:end] = cast(grad, wire.dtype, divisor)
            else:
                grad[...] = cast(wire[begin:end], grad.dtype)
