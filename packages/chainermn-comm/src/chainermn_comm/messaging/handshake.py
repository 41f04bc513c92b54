"""The handshake before collective calls: all ranks mean the same call, and none has failed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NoReturn

from mpi4py import MPI

from ..call_place import called_at
from ..errors import (
    describe,
    mark_failed,
    peer_error,
    share_failure,
)
from ..numbers import as_integer, wrong_kind
from ..observers import NOBODY, CallObserver
from ..signatures import checked_signature, mismatch_error, view_of

# The facts that must be equal on all ranks: entries of a name and its values. Of signatures that
# differ, the first entry that differs is reported.
Signature = Sequence[tuple[Any, ...]]

# The head of each rank's entry: digest of operation and signature, number of calls so
# far, 1 if the rank has an error, length of its payload. The payload's first bytes follow,
# so that a short payload, such as the headers of a few arrays, needs no second exchange.
_PREFIX = struct.Struct("<16sQII")
_INLINE_BYTES = 96
_ENTRY_BYTES = _PREFIX.size + _INLINE_BYTES


class Handshake:
    """The handshake of one communicator's ranks.

    Each call is one ``Allgather`` of 128 bytes a rank. Ranks that call different
    operations take part in it all the same, and stay in step for the next call. It is
    also a barrier: no rank returns before all have entered.

    Attributes:
        interruptions: why this rank is out of step with the others, if it is.
        under_way: refers to the outermost call that a thread is in, see
            ``process_group.InCall``.
    """

    def __init__(
        self, comm: MPI.Intracomm, observer: CallObserver | None = None
    ) -> None:
        """Use ``comm``, which stays the caller's, and report each call to ``observer``."""
        self._comm = comm
        self.rank = comm.rank
        self._size = comm.size
        self.observer = observer or CallObserver()
        self._arrived = self.observer.arrived
        self.leave = self.observer.leave  # reports the end of a call
        self.under_way: Any = None
        self.interruptions: list[str] = []
        # Stands for the last call if all ranks raised in it.
        self._last_failure: object | None = None
        self._calls = 0
        self._received = bytearray(_ENTRY_BYTES * comm.size)

    def __call__(
        self,
        operation: str,
        signature: Iterable[tuple[Any, ...]] = (),
        payload: bytes = b"",
        nbytes: int = 0,
        error: BaseException | None = None,
    ) -> list[bytes]:
        """Check one collective call, as ``CommunicatorBase.handshake`` says (collective).

        ``nbytes`` is the size of this rank's data, for the observer.
        """
        if error is not None:
            if not self.interruptions:  # otherwise the other ranks are in another call
                self._send_failure(operation, error)
            raise error
        try:
            if not isinstance(payload, bytes):
                what = f"the payload of {operation} must be bytes"
                raise wrong_kind(what, payload, self.rank)
            entries = checked_signature(operation, signature)
            digest = _digest_of_text(repr((operation, *entries)))
        except BaseException as caught:
            share_failure(self, operation, caught)
            raise
        self.begin(operation, nbytes, self._root_of(entries))
        prefix = _PREFIX.pack(digest, self._calls, False, len(payload))
        entry = self._allgather(prefix + payload[:_INLINE_BYTES])
        is_equal = self._received == entry * self._size
        if is_equal and len(payload) <= _INLINE_BYTES:
            payloads = [payload] * self._size
        else:
            payloads = self._compare(prefix, payload, operation, entries)
        if self._arrived is not None:
            self._arrived(operation, self._calls)
        return payloads

    def begin(self, operation: str, nbytes: int = 0, root: int = NOBODY) -> None:
        """Begin a call that all ranks make: count it, and report it (not collective)."""
        self._calls += 1
        self._last_failure = None
        self.observer.collective(operation, self._calls, root, nbytes)

    def raised_on_all(self, error: BaseException) -> BaseException:
        """Return ``error``, marked as an error of the last call that all ranks raise."""
        self._last_failure = mark_failed(error)
        return error

    def _send_failure(self, operation: str, error: BaseException) -> None:
        self.begin(operation)
        self._allgather(_PREFIX.pack(b"", self._calls, True, 0))
        self._comm.allgather(describe(error, self.rank))
        self.raised_on_all(error)

    def _allgather(self, own: bytes) -> bytes:
        """Receive the entries of all ranks; return this rank's, filled up (collective)."""
        entry = own.ljust(_ENTRY_BYTES, b"\0")
        self._comm.Allgather([entry, MPI.BYTE], [self._received, MPI.BYTE])
        return entry

    def _root_of(self, signature: Signature) -> int:
        """Return the rank that an entry names as the root; NOBODY if none does."""
        for name, *values in signature:
            if name == "root" and values:
                # A user's entry of this name may have any value.
                root = as_integer(values[0])
                if root is not None and 0 <= root < self._size:
                    return root
        return NOBODY

    def _compare(
        self, prefix: bytes, payload: bytes, operation: str, signature: Signature
    ) -> list[bytes]:
        """Return the payloads; raise on all ranks if the calls differ or a rank has failed."""
        starts = range(0, len(self._received), _ENTRY_BYTES)
        entries = [self._received[start : start + _ENTRY_BYTES] for start in starts]
        lengths = [len(payload)] * len(entries)
        if not all([entry.startswith(prefix) for entry in entries]):
            heads = [_PREFIX.unpack_from(entry) for entry in entries]
            lengths = [length for *_, length in heads]
            if any(has_failed for _, _, has_failed, _ in heads):
                texts = self._comm.allgather("")
                raise self.raised_on_all(peer_error(operation, self.rank, texts))
            if any(head[:2] != heads[0][:2] for head in heads):
                self.raise_mismatch(operation, signature)
        if max(lengths) > _INLINE_BYTES:
            return self._gather(payload, lengths)
        return [
            bytes(entry[_PREFIX.size : _PREFIX.size + length])
            for entry, length in zip(entries, lengths, strict=True)
        ]

    def raise_mismatch(self, operation: str, signature: Signature) -> NoReturn:
        """Raise RankMismatchError with what differs, and where each rank called (collective)."""
        own = view_of(operation, signature), called_at(operation)
        views, calls = zip(*self._comm.allgather(own), strict=True)
        raise self.raised_on_all(mismatch_error(operation, self.rank, views, calls))

    def _gather(self, own: bytes, lengths: list[int]) -> list[bytes]:
        """Return the payloads of all ranks, some of which are long (collective)."""
        gathered = bytearray(sum(lengths))
        self._comm.Allgatherv([own, MPI.BYTE], [gathered, lengths, MPI.BYTE])
        ends = zip(accumulate(lengths), lengths, strict=True)
        return [bytes(gathered[end - length : end]) for end, length in ends]


@lru_cache(maxsize=64)
def dtype_name(dtype: Any) -> str:
    """Return a dtype's name for signatures; cached, because NumPy takes long to make it."""
    return str(dtype)


def digest_of(signature: Sequence[Any]) -> bytes:
    """Return 16 bytes that are equal for equal signatures."""
    return _digest_of_text(repr(signature))


@lru_cache(maxsize=64)
def _digest_of_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
