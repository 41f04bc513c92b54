"""Notes what the calls of this process are part of, and what it does while others may wait."""

from __future__ import annotations

import threading

from . import calls
from .records import ALONE, DOING, DOING_AT, NOTHING, PART


class Noted:
    """A context manager that notes something, and on leaving what this thread noted before."""

    __slots__ = ("_before", "_kind", "_since", "_text")

    def __init__(self, kind: int, text: str) -> None:
        self._kind, self._text = kind, calls.encoded(text)

    def __enter__(self) -> None:
        me = threading.get_ident()
        self._since, self._before = calls._now(), _innermost.get(me)
        _innermost[me] = self
        _write()

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        if self._before is None:
            _innermost.pop(me, None)
        else:
            _innermost[me] = self._before
        _write()


# What each thread noted last and is still inside of.
_innermost: dict[int, Noted] = {}


def _write() -> None:
    """Note that of the thread that works alone, or of the one that noted something last."""
    area = calls._area
    if area is not None:
        all_of_them = list(_innermost.values())
        noted = next((one for one in all_of_them if one._kind == ALONE), None)
        if noted is None and all_of_them:
            noted = all_of_them[-1]
        known = (NOTHING, 0.0, b"") if noted is None else (noted._kind, noted._since, noted._text)
        DOING.pack_into(area.memory, DOING_AT, *known)


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
