"""Notes what the calls of this process are part of, and what it does while others may wait."""

from __future__ import annotations

from . import calls
from .records import ALONE, DOING, DOING_AT, NOTHING, PART

_END = DOING_AT + DOING.size


class Noted:
    """A context manager that notes something, and on leaving what was noted before."""

    __slots__ = ("_before", "_kind", "_text")

    def __init__(self, kind: int, text: str) -> None:
        self._kind, self._text = kind, calls.encoded(text)

    def __enter__(self) -> None:
        area = calls._area
        self._before = None
        if area is not None:
            self._before = area.memory[DOING_AT:_END]
            DOING.pack_into(area.memory, DOING_AT, self._kind, calls._now(), self._text)

    def __exit__(self, *_: object) -> None:
        area = calls._area
        if area is not None:
            area.memory[DOING_AT:_END] = self._before or DOING.pack(NOTHING, 0.0, b"")


def part_of(what: str) -> Noted:
    """Within, reports say that this process is inside of ``what``, such as a function."""
    return Noted(PART, what)


def alone(what: str) -> Noted:
    """Within, this process does something that may take long, while the others may wait for it.

    Where ``CHAINERMN_TIMEOUT`` is set, the job isn't ended before a call has waited ten minutes
    for a rank that is within. Reports say what it does.

    Args:
        what: shown in reports, such as ``"download"``; the first 64 bytes count.
    """
    return Noted(ALONE, what)
