"""The handshake before collective calls: all ranks mean the same call, and none has failed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NoReturn

from mpi4py import MPI

from ..errors import (
    CommunicationError,
    describe,
    entries_of,
    is_known_to_all,
    is_raised_on_all,
    now,
    raise_failure,
    raise_mismatch,
    raised_on_all,
    share_failure,
    view_of,
)
from ..numbers import as_integer
from ..observers import NOBODY, CallObserver

# What must be equal on all ranks: entries of a name and its values. Of signatures that
# differ, the first entry that differs is reported.
Signature = Iterable[tuple[Any, ...]]

# What each rank contributes: digest of operation and signature, calls so far, 1 if the
# rank has an error, length of its payload. The payload's first bytes follow, so that
# short ones, such as the headers of a few arrays, need no second exchange.
_PREFIX = struct.Struct("<16sQII")
_INLINE_BYTES = 96
_ENTRY_BYTES = _PREFIX.size + _INLINE_BYTES
# Signatures whose digests are kept. Loops repeat few different calls.
_CACHED_SIGNATURES = 64


class Handshake:
    """The handshake of one communicator's ranks.

    Each call is one ``Allgather`` of 128 bytes a rank. Ranks that call different
    operations take part in it all the same, and stay in step for the next call. It is
    also a barrier: no rank returns before all have entered.
    """

    def __init__(
        self, comm: MPI.Intracomm, observer: CallObserver | None = None
    ) -> None:
        """Use ``comm``, which stays the caller's, and report each call to ``observer``."""
        self._comm = comm
        self.rank, self._size = comm.rank, comm.size
        self.observer = observer or CallObserver()
        self._arrived = self.observer.arrived
        self.leave = self.observer.leave  # reports the end of a call
        # The thread that is in a call, and the outermost one of its calls.
        self.thread: int | None = None
        self.call = ""
        self._calls = 0
        # What interrupted steps that all ranks take together: this rank is out of step
        # since then.
        self.interruptions: list[str] = []
        self._received = bytearray(_ENTRY_BYTES * comm.size)
        self._starts = range(0, len(self._received), _ENTRY_BYTES)
        # By operation and signature: the digest, and the root.
        self._digests: dict[Any, tuple[bytes, int]] = {}

    def __call__(
        self,
        operation: str,
        signature: Signature = (),
        payload: bytes = b"",
        nbytes: int = 0,
        error: BaseException | None = None,
        typed: bool = False,
    ) -> list[bytes]:
        """Check one collective call, as ``CommunicatorBase.handshake`` says (collective).

        ``nbytes`` is how much data this rank has, for the observer. An ``error`` is
        raised where a :class:`SharedFailure` catches it. A user's signature is
        ``typed``: its values may have no hash, or equal ones another type.
        """
        if error is not None:
            self._fail(operation, error)
        try:
            if typed:
                signature = tuple(signature)
            digest, root = self._digest(operation, signature, typed)
        except BaseException as caught:
            share_failure(self, operation, caught)
            raise
        self._calls += 1
        self.observer.collective(operation, self._calls, root, nbytes)
        prefix = _PREFIX.pack(digest, self._calls, False, len(payload))
        entry = (prefix + payload[:_INLINE_BYTES]).ljust(_ENTRY_BYTES, b"\0")
        received = self._received
        self._comm.Allgather([entry, MPI.BYTE], [received, MPI.BYTE])
        if len(payload) <= _INLINE_BYTES and received == entry * self._size:
            payloads = [payload] * self._size
        else:
            entries = [received[start : start + _ENTRY_BYTES] for start in self._starts]
            lengths = [len(payload)] * len(entries)
            if not all([other.startswith(prefix) for other in entries]):
                lengths = self._compare(entries, operation, signature)
            payloads = self._payloads(entries, lengths, payload)
        if self._arrived is not None:
            self._arrived(operation, self._calls)
        return payloads

    def _fail(self, operation: str, error: BaseException) -> NoReturn:
        # The others are elsewhere, or they have raised in the last call, as this rank
        # did.
        if self.interruptions:
            raise error
        if is_known_to_all(error, (id(self), self._calls)):
            raise raised_on_all(error, (id(self), self._calls))
        self._calls += 1
        self.observer.collective(operation, self._calls)
        entry = _PREFIX.pack(b"", self._calls, True, 0).ljust(_ENTRY_BYTES, b"\0")
        self._comm.Allgather([entry, MPI.BYTE], [self._received, MPI.BYTE])
        self._comm.allgather(describe(error, self._comm.rank))
        raise raised_on_all(error, (id(self), self._calls))

    def begin(self, operation: str, nbytes: int = 0) -> None:
        """Report a call that all ranks make without a handshake (not collective)."""
        self._calls += 1
        self.observer.collective(operation, self._calls, NOBODY, nbytes)

    def _digest(
        self, operation: str, signature: Signature, typed: bool
    ) -> tuple[bytes, int]:
        # Hashing each signature anew would cost more than the exchange itself.
        key = operation, repr(signature) if typed else signature
        found = self._digests.get(key)
        if found is None:
            entries = entries_of(operation, signature)
            # A user's entry of this name may have any value.
            named = [
                as_integer([*entry, None][1]) for entry in entries if entry[0] == "root"
            ]
            root = next(
                (it for it in named if it is not None and 0 <= it < self._size), NOBODY
            )
            if len(self._digests) >= _CACHED_SIGNATURES:
                self._digests.clear()
            found = self._digests[key] = digest_of(entries), root
        return found

    def _compare(
        self, entries: list[bytearray], operation: str, signature: Signature
    ) -> list[int]:
        """Return the lengths of the ranks' payloads; raise if more than the lengths differs."""
        prefixes, since = [_PREFIX.unpack_from(entry) for entry in entries], now()
        try:
            if any(failed for _, _, failed, _ in prefixes):
                raise_failure(operation, self._comm.rank, self._comm.allgather(""))
            if any(other[:2] != prefixes[0][:2] for other in prefixes):
                views = self._comm.allgather(view_of(operation, signature))
                raise_mismatch(operation, self._comm.rank, views)
        except CommunicationError as error:
            if is_raised_on_all(error, since):  # and not by a signal's handler
                raised_on_all(error, (id(self), self._calls))
            raise
        return [length for *_, length in prefixes]

    def _payloads(
        self, entries: list[bytearray], lengths: list[int], own: bytes
    ) -> list[bytes]:
        if max(lengths) <= _INLINE_BYTES:
            return [
                bytes(entry[_PREFIX.size : _PREFIX.size + length])
                for entry, length in zip(entries, lengths, strict=True)
            ]
        gathered = bytearray(sum(lengths))
        self._comm.Allgatherv([own, MPI.BYTE], [gathered, lengths, MPI.BYTE])
        ends = zip(accumulate(lengths), lengths, strict=True)
        return [bytes(gathered[end - length : end]) for end, length in ends]


def digest_of(signature: tuple[Any, ...]) -> bytes:
    """Return 16 bytes that are equal where signatures are."""
    return hashlib.blake2b(repr(signature).encode(), digest_size=16).digest()
