"""Records what the calls of this process are part of, and work for which others have to wait."""

from __future__ import annotations

import os
import threading

from . import recorder
from .status_region import ANNOTATED, EXEMPT, NO_SCOPE, SCOPE, SCOPE_OFFSET


class ScopeContext:
    """A context manager that records a scope, and on leaving the one around it."""

    __slots__ = ("_kind", "_name", "_outer", "_since")

    def __init__(self, kind: int, name: str) -> None:
        self._kind, self._name = kind, recorder.encode_name(name)

    def __enter__(self) -> None:
        self._since = recorder._now()
        self._outer = _replace(self)

    def __exit__(self, *_: object) -> None:
        _replace(self._outer)


# The innermost scope of each thread that is in one, the last entered at the end.
_innermost: dict[int, ScopeContext] = {}
# A signal's handler may enter one while its thread does.
_lock = threading.RLock()


def _replace(scope: ScopeContext | None) -> ScopeContext | None:
    """Make this the thread's innermost scope, and return the one that was.

    Recorded is that of a thread whose work is exempt, or else the one that was entered last.
    """
    with _lock:
        before = _innermost.pop(threading.get_ident(), None)
        if scope is not None:
            _innermost[threading.get_ident()] = scope
        region = recorder._region
        if region is not None:
            last = next(reversed(_innermost.values()), None)
            shown = next((one for one in _innermost.values() if one._kind == EXEMPT), last)
            values = (shown._kind, shown._since, shown._name) if shown else (NO_SCOPE, 0.0, b"")
            # `pack_into` would write zeros first.
            region.memory[SCOPE_OFFSET : SCOPE_OFFSET + SCOPE.size] = SCOPE.pack(*values)
        return before


def _reset_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    _innermost.clear()


os.register_at_fork(after_in_child=_reset_in_child)


def annotate(what: str) -> ScopeContext:
    """Within, reports say that this process is inside of ``what``, such as a function."""
    return ScopeContext(ANNOTATED, what)


def alone(what: str) -> ScopeContext:
    """Within, this process does something that may take long, while the others may wait for it.

    Where ``CHAINERMN_TIMEOUT`` is set, the job isn't ended before a call has waited ten minutes
    for a rank that is within. Reports say what it does. Not collective.

    Args:
        what: shown in reports, such as ``"download"``; the first 64 bytes count.
    """
    return ScopeContext(EXEMPT, what)
