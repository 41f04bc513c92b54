"""The errors that communication raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn


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


def describe(error: BaseException, rank: int) -> str:
    """The exception in words, without the rank's number, which the others put before it."""
    kind, colon, text = describe_exception(error).partition(": ")
    return kind + colon + text.removeprefix(f"rank {rank}: ")


def raise_failure(
    operation: str, rank: int, error: BaseException | None, texts: Sequence[str | None]
) -> NoReturn:
    """Raise ``error`` where there is one, and elsewhere PeerError with each rank's text."""
    if error is not None:
        try:
            raise error
        finally:
            del error  # its traceback leads back here, a cycle that would keep all its frames
    failures = "; ".join(f"rank {other}: {text}" for other, text in enumerate(texts) if text)
    raise PeerError(f"{operation} on rank {rank} failed because of {failures}")


def raise_mismatch(
    operation: str, rank: int, signatures: Sequence[Sequence[tuple[Any, ...]]]
) -> NoReturn:
    """Raise RankMismatchError, which tells the first entry that differs as each rank has it."""
    name, values = _first_difference(signatures)
    raise RankMismatchError(
        f"{operation} on rank {rank}: ranks disagree on {name}: {_by_ranks(values)}", name
    )


def _first_difference(signatures: Sequence[Sequence[tuple[Any, ...]]]) -> tuple[str, list[str]]:
    for index in range(max(map(len, signatures))):
        entries = [signature[index] if index < len(signature) else None for signature in signatures]
        if any(repr(entry) != repr(entries[0]) for entry in entries):
            names = dict.fromkeys(entry[0] for entry in entries if entry)
            shown = slice(1 if len(names) == 1 else 0, None)
            return " or ".join(names), [
                " ".join(map(str, entry[shown])) if entry else "none" for entry in entries
            ]
    return "the number of calls so far", ["unknown"] * len(signatures)


def _by_ranks(values: list[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"{value} on rank{'s' if len(those) > 1 else ''} {', '.join(those)}"
        for value, those in ranks.items()
    )
