"""The sizes that are measured, and how users write them."""

from __future__ import annotations

import re

from chainermn_tools.formatting import KIB

# 1 KiB to 256 MiB.
SMALLEST, LARGEST, STEP = KIB, 256 << 20, 4
WRITTEN = re.compile(r"([0-9]{1,15})\s*(?:([KMGT]?)(?:i?B)?)", re.IGNORECASE)


def up_to(largest: int) -> list[int]:
    """Return the sizes from ``SMALLEST`` that are measured, in bytes."""
    found = [SMALLEST]
    while found[-1] * STEP <= largest:
        found.append(found[-1] * STEP)
    return found


def parse(text: str) -> int:
    """Return the number of bytes that ``64M``, ``64MB`` or ``64MiB`` means: all three 64 * 2**20.

    Raises:
        ValueError: it means none.
    """
    found = WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write it as 64K, 16M or 1G")
    size: int = int(found[1]) * KIB ** " KMGT".index(found[2].upper() or " ")
    return size
