"""Numbers of bytes and seconds in words, and foreign words made fit for a terminal."""

from __future__ import annotations

KIB = 1 << 10
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_in_words(nbytes: float) -> str:
    """Bytes in the largest unit of which there is at least one."""
    power = 0
    while nbytes >= KIB and power < len(UNITS) - 1:
        nbytes /= KIB
        power += 1
    return f"{nbytes:.0f} {UNITS[power]}" if nbytes >= 10 else f"{nbytes:.3g} {UNITS[power]}"


def time_in_words(seconds: float) -> str:
    """Three digits and a unit."""
    if not seconds:
        return "0"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, scale = next((one for one in units if seconds >= one[1]), units[-1])
    value = seconds / scale
    return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"


def printable(text: str, kept: str = "") -> str:
    """The text with spaces for control characters, which files and programs may hold.

    Args:
        text: from anywhere.
        kept: control characters that stay.
    """
    return "".join(c if c.isprintable() or c in kept else " " for c in text)
