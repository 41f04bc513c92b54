"""Observers of a communicator's calls, such as the watchdog's recorder and the trace.

It imports the standard library only, since the watchdog's monitor has nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

NOBODY = -1  # in place of a rank, or of a tag


class CallObserver:
    """Observes the calls of one communicator. This one does nothing; others override methods."""

    # Called with the operation and its number once all ranks have come to a collective
    # call and mean the same; None if nobody asks. All ranks call it at the same point:
    # an observer that all of them have may communicate in it.
    arrived: Any = None

    def collective(
        self, operation: str, number: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        """This rank is about to wait in a collective call, or in another step of the same one."""

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, what: str = ""
    ) -> None:
        """This rank is about to wait for one other rank; ``what`` names the purpose."""

    def leave(self) -> None:
        """This rank waits no longer."""

    def release(self) -> None:
        """The communicator has been finalized."""


def combined(*observers: CallObserver | None) -> CallObserver:
    """Return one observer for several; if only one isn't None, that one, which is faster."""
    found = [one for one in observers if one is not None]
    if len(found) == 1:
        return found[0]
    several = CallObserver()
    for name in ("collective", "message", "leave", "release"):
        methods = [getattr(one, name) for one in found]
        setattr(several, name, functools.partial(_call_each, methods))
    for one in found:
        several.arrived = several.arrived or one.arrived  # at most one has it
    return several


def _call_each(methods: list[Callable[..., None]], *args: Any, **kwargs: Any) -> None:
    for method in methods:
        method(*args, **kwargs)
