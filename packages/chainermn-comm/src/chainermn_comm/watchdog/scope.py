"""Notes what the calls of this process are part of, and what it does while others may wait."""

from __future__ import annotations

import os
import threading

from . import recorder
from .status_region import ALONE, DOING, DOING_AT, NOTHING, PART

_END = DOING_AT + DOING.size


class Noted:
    """A context manager that notes something, and on leaving what this thread noted before."""

    __slots__ = ("_before", "_kind", "_since", "_text")

    def __init__(self, kind: int, text: str) -> None:
        self._kind, self._text = kind, recorder.encoded(text)

    def __enter__(self) -> None:
        self._since = recorder._now()
        self._before = _replace(self)

    def __exit__(self, *_: object) -> None:
        _replace(self._before)


# What each thread noted last and is still inside of; the last one of all at the end.
_innermost: dict[int, Noted] = {}
# A signal's handler may note something while its thread does.
_lock = threading.RLock()


def _replace(noted: Noted | None) -> Noted | None:
    """Note this for the thread in place of what it noted before, which is returned.

    Shown is that of a thread that works alone, or of the one that noted something last.
    """
    with _lock:
        before = _innermost.pop(threading.get_ident(), None)
        if noted is not None:
            _innermost[threading.get_ident()] = noted
        area = recorder._area
        if area is not None:
            last = next(reversed(_innermost.values()), None)
            shown = next((one for one in _innermost.values() if one._kind == ALONE), last)
            known = (NOTHING, 0.0, b"")
            if shown is not None:
                known = shown._kind, shown._since, shown._text
            area.memory[DOING_AT:_END] = DOING.pack(*known)  # `pack_into` writes zeros first
        return before


def _forget_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _innermost.clear()


os.register_at_fork(after_in_child=_forget_in_child)


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
