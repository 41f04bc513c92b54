"""Numbers of bytes and seconds, in words and out of them."""

from __future__ import annotations

import re

KIB = 1 << 10
# 1 KiB to 256 MiB.
SMALLEST, LARGEST, STEP = KIB, 256 << 20, 4
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
WRITTEN = re.compile(r"([0-9]{1,15})\s*(?:([KMGT]?)(?:i?B)?)", re.IGNORECASE)


def up_to(largest: int) -> list[int]:
    """The sizes that are measured."""
    found = [SMALLEST]
    while found[-1] * STEP <= largest:
        found.append(found[-1] * STEP)
    return found


def parse(text: str) -> int:
    """The number of bytes that ``64M``, ``64MB`` or ``64MiB`` means: all three 64 * 2**20.

    Raises:
        ValueError: it means none.
    """
    found = WRITTEN.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write it as 64K, 16M or 1G")
    return int(found[1]) * KIB ** " KMGT".index(found[2].upper() or " ")


def in_words(nbytes: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    power = 0
    while nbytes >= KIB and power < len(UNITS) - 1:
        nbytes /= KIB
        power += 1
    return f"{nbytes:.0f} {UNITS[power]}" if nbytes >= 10 else f"{nbytes:.3g} {UNITS[power]}"


def time_in_words(seconds: float) -> str:
    """Three digits and a unit."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, scale = next((one for one in units if seconds >= one[1]), units[-1])
    value = seconds / scale
    return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
