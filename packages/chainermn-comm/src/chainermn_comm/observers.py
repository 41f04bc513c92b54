"""Observers of a communicator's calls, such as the watchdog's recorder and the trace.

This module imports only the standard library, because the watchdog's monitor does.
"""

from __future__ import annotations

from typing import Any

NOBODY = -1  # stands for no rank, or no tag


class CallObserver:
    """Observes the calls of one communicator. This class does nothing; subclasses do."""

    # Called with the operation and its number once all ranks have come to a collective
    # call and mean the same; None if nobody asks. All ranks call it at the same point:
    # an observer that all of them have may communicate in it.
    arrived: Any = None

    def collective(
        self, operation: str, number: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        """Note that this rank is about to wait in a collective call, or in a further step of it."""

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, what: str = ""
    ) -> None:
        """Note that this rank is about to wait for one other rank; ``what`` names the purpose."""

    def leave(self, error: BaseException | None = None) -> None:
        """Note that this rank waits no longer, perhaps because the call raises an error."""

    def release(self) -> None:
        """Note that the communicator has been finalized."""
