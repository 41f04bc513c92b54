"""The errors that communication raises."""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """A collective call could not be carried out; every rank that took part raises."""


class RankMismatchError(CommunicationError, ValueError):
    """Ranks called different operations, or the same one with arguments that don't fit.

    Attributes:
        entry: what they disagree on, as the message names it; empty where it names nothing.
    """

    def __init__(self, message: str = "", entry: str = "") -> None:
        """Say ``message``; ``entry`` names what differs."""
        super().__init__(message)
        self.entry = entry


class PeerError(CommunicationError):
    """Another rank found an error before it could take part in this call.

    That rank raises the error itself; the others raise this one, which names it.
    """


class FinalizedError(CommunicationError):
    """A communicator was used after its ``finalize``."""


def describe_exception(error: BaseException) -> str:
    """The exception's type and text, even if asking for its text fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (it has no text: its __str__ fails)"
