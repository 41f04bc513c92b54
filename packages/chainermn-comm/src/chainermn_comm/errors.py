"""The errors that communication raises, and how one rank's error becomes one of all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import count, zip_longest
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from _chainermn_verdict import FOLLOWS

# Attributes of an error: the call in which all ranks raised, and when that was by this
# clock; the call alone, where a `SharedFailure` was around it.
_RAISED_ON_ALL, _RAISED_WITHIN = "_chainermn_raised_on_all", "_chainermn_raised_within"
_clock = count()
now = _clock.__next__  # a time of that clock


class CommunicationError(RuntimeError):
    """A collective operation failed; every rank that took part in it raises."""


class RankMismatchError(CommunicationError, ValueError):
    """Ranks called different operations, or the same one with arguments that don't fit.

    Attributes:
        entry: the name of what differs, as in the message; empty where the message names nothing.
    """

    def __init__(self, message: str = "", entry: str = "") -> None:
        """Make the error; ``message`` is its text, and ``entry`` names what differs."""
        super().__init__(message)
        self.entry = entry


class PeerError(CommunicationError):
    """Another rank has an error and can't take part in this collective operation.

    That rank raises its error itself; the others raise this one, whose text names the
    rank and its error.
    """


class FinalizedError(CommunicationError):
    """A communicator was used after its ``finalize``; raised on the rank that does so."""


def describe_exception(error: BaseException) -> str:
    """Return the exception's type and text, even if its ``__str__`` fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (it has no text: its __str__ fails)"


def describe(error: BaseException, rank: int) -> str:
    """Return the exception's type and text without this rank's number, which PeerError adds."""
    kind, colon, text = describe_exception(error).partition(": ")
    return kind + colon + text.removeprefix(f"rank {rank}: ")


def raise_failure(operation: str, rank: int, texts: Sequence[str | None]) -> NoReturn:
    """Raise PeerError with the text of each rank that has an error."""
    failures = "; ".join(
        f"rank {other}: {text}" for other, text in enumerate(texts) if text
    )
    raise raised_on_all(
        PeerError(f"{operation} on rank {rank} failed because of {failures}")
    )


def raise_mismatch(operation: str, rank: int, views: Sequence[str]) -> NoReturn:
    """Raise RankMismatchError with every rank's values of the first entry that differs.

    ``views`` are of the ranks' signatures, see :func:`view_of`; there are few different
    ones. The errors of all ranks but one that few agree with are secondary.
    """
    decoded = {view: json.loads(view) for view in dict.fromkeys(views)}
    name, values = "the number of calls so far", dict.fromkeys(decoded, "unknown")
    for entries in zip_longest(*decoded.values(), fillvalue=("", "", "none")):
        if len({compared for _, compared, _ in entries}) > 1:
            names = dict.fromkeys(name for name, *_ in entries if name)
            name = " or ".join(names)
            for view, (own, _, value) in zip(decoded, entries, strict=True):
                values[view] = value if len(names) == 1 else f"{own} {value}".strip()
            break
    ranks: dict[str, list[str]] = {}
    for other, view in enumerate(views):
        ranks.setdefault(values[view], []).append(str(other))
    by_ranks = "; ".join(
        f"{value} on rank{'s' if len(those) > 1 else ''} {', '.join(those)}"
        for value, those in ranks.items()
    )
    text = f"{operation} on rank {rank}: ranks disagree on {name}: {by_ranks}"
    error = raised_on_all(RankMismatchError(text, name))
    vars(error)[FOLLOWS] = str(rank) != min(reversed(ranks.values()), key=len)[0]
    raise error


def entries_of(operation: str, signature: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return what ranks compare by its ``repr``; TypeError if an entry is no tuple with a name."""
    for entry in (entries := (("operation", operation), *signature)):
        if not (isinstance(entry, tuple) and entry and isinstance(entry[0], str)):
            raise TypeError(
                f"the signature of {operation} must have tuples of a name and values, got {entry!r}"
            )
    return tuple(map(_plain, entries))


def view_of(operation: str, signature: Iterable[tuple[Any, ...]]) -> str:
    """Return of each entry what ranks compare and show: text, since any value can be sent so."""
    entries = entries_of(operation, signature)
    return json.dumps(
        [(name, repr(of), " ".join(map(str, of))) for name, *of in entries]
    )


def _plain(value: Any) -> Any:
    """Return NumPy's numbers, also in tuples, as Python's."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


class SharedFailure:
    """What is raised within makes all ranks raise; a handshake is to follow where nothing is.

    That includes `KeyboardInterrupt` and `SystemExit`: the other ranks are about to
    wait. What the handshake's last call has raised on all ranks, within, isn't sent
    again. ``handshake`` is a communicator's, or is called like it:
    ``handshake(operation, error=error)``.
    """

    def __init__(self, handshake: Callable[..., Any], operation: str) -> None:
        self._handshake, self._operation = handshake, operation

    def __enter__(self) -> None:
        self._entered = now()

    def __exit__(
        self, _: object, error: BaseException | None, __: TracebackType | None
    ) -> None:
        if error is not None:
            raised = vars(error).get(_RAISED_ON_ALL)
            if raised is not None and raised[1] > self._entered:
                vars(error)[_RAISED_WITHIN] = raised[0]
            share_failure(self._handshake, self._operation, error)


def raised_on_all(
    error: BaseException, call: tuple[int, int] | None = None
) -> BaseException:
    """Return an error that all ranks are about to raise, recorded as such.

    ``call`` is the id of a handshake and the number of its call, if that made them.
    """
    vars(error)[_RAISED_ON_ALL] = call, now()
    return error


def is_raised_on_all(error: BaseException, since: int) -> bool:
    """Return whether all ranks have come to raise since that time, which :func:`now` returned."""
    _, time = vars(error).get(_RAISED_ON_ALL, (None, -1))
    return bool(time > since)


def is_known_to_all(error: BaseException, call: tuple[int, int]) -> bool:
    """Return whether a `SharedFailure` passes on what all ranks have raised in this call."""
    return bool(vars(error).pop(_RAISED_WITHIN, None) == call)


def without_traceback(error: Any) -> Any:
    """Return an error like this one; it keeps no frames, nor the arrays that these refer to."""
    # Its `__init__` may want other arguments.
    twin = type(error).__new__(type(error), *error.__reduce__()[1])
    vars(twin).update(vars(error))
    return twin


def share_failure(
    handshake: Callable[..., Any], operation: str, error: BaseException
) -> None:
    """Do what leaving a :class:`SharedFailure` by this error does; the caller raises it again."""
    traceback = error.__traceback__
    try:
        handshake(operation, error=error)
    except BaseException as raised:
        if raised is not error:
            raise
        # A frame that is in the error's traceback and refers to the error, as that of
        # the handshake may, would keep all frames, and their arrays, until the next
        # collection.
        error.__traceback__ = traceback
