"""The errors that communication raises, and how one rank's error reaches all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

# The attribute that marks errors which all ranks raise together. Its value stands for
# the call in which they do.
_MARK = "_chainermn_failed_call"
# The largest number of ranks that a text lists.
MOST_RANKS = 32


class CommunicationError(RuntimeError):
    """A collective operation failed; every rank that took part in it raises."""


class RankMismatchError(CommunicationError, ValueError):
    """Ranks called different operations, or one operation with arguments that don't fit together.

    Attributes:
        entry: the name of what differs, as in the message, or an empty string.
    """

    def __init__(self, message: str = "", entry: str = "") -> None:
        """Make the error; ``message`` is its text, and ``entry`` names what differs."""
        super().__init__(message)
        self.entry = entry


class PeerError(CommunicationError):
    """Another rank has an error and can't take part in this collective operation.

    That rank raises its own error. All others raise a PeerError, whose text names the
    rank and its error.
    """


class FinalizedError(CommunicationError):
    """A communicator was used after its ``finalize``; raised on the rank that used it."""


class raise_together:
    """A block of code after which all ranks raise if one rank has raised inside.

    The end of the block is one handshake of the communicator (collective)::

        with raise_together(comm.handshake, "save") as call:
            check(arguments)
            call.signature = (("step", step),)
            call.payload = own
        use(call.payloads)

    Any exception that leaves the block, including KeyboardInterrupt and SystemExit, is
    raised on this rank, and PeerError on the other ranks, which would wait in vain. An
    error that all ranks have raised together inside of the block, in the communicator's
    last call, is not exchanged a second time.

    Attributes:
        signature: entries that must be equal on all ranks; set in the block.
        payload: bytes for the other ranks; set in the block.
        nbytes: how much data this rank moves next, for the observer of a ``Handshake``.
        payloads: the payloads of all ranks, after the block.
    """

    def __init__(
        self, handshake: Callable[..., Any], operation: str, *, meet: bool = True
    ) -> None:
        """Use ``handshake``: a communicator's method, a ``Handshake``, or a similar function.

        Without ``meet``, a block that raises nothing ends without a handshake. The
        handshake of the caller's next collective call then finds the other ranks' errors.
        """
        self._handshake = handshake
        self._operation = operation
        self._meet = meet
        self.signature: Iterable[tuple[Any, ...]] = ()
        self.payload = b""
        self.nbytes = 0
        self.payloads: list[bytes] = []

    def __enter__(self) -> Self:
        self._failed_before = _last_failure_of(self._handshake)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            last = _last_failure_of(self._handshake)
            has_failed_since = last is not self._failed_before
            if not (has_failed_since and is_raised_on_all(self._handshake, error)):
                share_failure(self._handshake, self._operation, error)
        elif self._meet:
            options: dict[str, Any] = {"payload": self.payload}
            if self.nbytes:  # only a `Handshake` takes this argument
                options["nbytes"] = self.nbytes
            self.payloads = self._handshake(self._operation, self.signature, **options)


def share_failure(
    handshake: Callable[..., Any], operation: str, error: BaseException
) -> None:
    """Raise PeerError on the other ranks; the caller raises ``error`` (collective)."""
    traceback = error.__traceback__
    try:
        handshake(operation, error=error)
    except BaseException as raised:
        if raised is not error:
            raise
        # Frames of the handshake refer to the error. In its traceback they would keep
        # all frames, and their arrays, until the next garbage collection.
        error.__traceback__ = traceback


def mark_failed(error: BaseException) -> object:
    """Mark an error as raised by all ranks in one call; return a token of the call."""
    call = vars(error)[_MARK] = object()
    return call


def is_raised_on_all(handshake: Callable[..., Any], error: BaseException) -> bool:
    """Return whether all ranks raised the error in the communicator's last call."""
    last = _last_failure_of(handshake)
    return last is not None and vars(error).get(_MARK) is last


def _last_failure_of(handshake: Callable[..., Any]) -> object | None:
    """Return what stands for the communicator's last call if all ranks raised in it."""
    communicator = getattr(handshake, "__self__", handshake)
    return getattr(communicator, "_last_failure", None)


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


def peer_error(operation: str, rank: int, texts: Sequence[str | None]) -> PeerError:
    """Return the error that has the text of each rank that failed, by rank."""
    failures = "; ".join(
        f"rank {other}: {text}" for other, text in enumerate(texts) if text
    )
    return PeerError(f"{operation} on rank {rank} failed because of {failures}")


def rank_list(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text; of many ranks only the first."""
    numbers = ", ".join(map(str, ranks[:MOST_RANKS]))
    if len(ranks) > MOST_RANKS:
        numbers += ", ..."
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def without_traceback(error: Any) -> Any:
    """Return a copy of the error without the frames, and arrays, that a traceback keeps."""
    # The class's `__init__` may need other arguments.
    twin = type(error).__new__(type(error), *error.__reduce__()[1])
    vars(twin).update(vars(error))
    return twin
