"""Lets ranks find out, before data move, that all of them mean the same collective call."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from ..errors import describe, raise_failure, raise_mismatch
from ..watchdog import NOBODY, CallRecorder

# What a rank says of its call: entries of a name and how that stands here; hashable, with a
# `repr` that tells all. Ranks agree when their views are equal; else the first entry that differs
# is told.
View = Iterable[tuple[Any, ...]]

# One record a rank: digest of the view, calls so far, 1 if the rank has a problem, length of
# its note. The note's first bytes ride along: frames of a few arrays need no second exchange.
_HEAD = struct.Struct("<16sQII")
_INLINE_BYTES = 96
_RECORD_BYTES = _HEAD.size + _INLINE_BYTES


class Agreement:
    """The agreement of one communicator's ranks.

    Each call is one ``Allgather`` of 128 bytes a rank, so ranks that call different
    operations meet here all the same, and stay in step for the next call.
    """

    def __init__(self, comm: MPI.Intracomm, record: CallRecorder | None = None) -> None:
        """Agree among the ranks of ``comm``; calls are noted in ``record``."""
        self._comm = comm
        self._size = comm.size
        self._record = record or CallRecorder()
        self._calls = 0
        self._received = bytearray(_RECORD_BYTES * comm.size)
        self._starts = range(0, len(self._received), _RECORD_BYTES)
        # Of a view: its digest, the root, and the bytes of what it tells of.
        self._digests: dict[Any, tuple[bytes, int, int]] = {}

    def __call__(
        self,
        operation: str,
        view: View = (),
        note: bytes = b"",
        problem: BaseException | None = None,
        nbytes: int = 0,
    ) -> list[bytes]:
        """Agree on one collective call (collective).

        Args:
            operation: the operation's name.
            view: what must be equal on all ranks.
            note: bytes for the other ranks, any length.
            problem: why this rank can't take part.
            nbytes: this rank's payload, for the watchdog, where ``view`` has no ``nbytes``.

        Returns:
            Every rank's note, in rank order.

        Raises:
            RankMismatchError: on all ranks, when operations or views differ.
            PeerError: on the ranks without a problem, when another has one;
                that one raises its problem itself.
        """
        self._calls += 1
        digest, root, size = self._digest(operation, view)
        self._record.collective(operation, self._calls, root, size or nbytes)
        head = _HEAD.pack(digest, self._calls, problem is not None, len(note))
        record = (head + note[:_INLINE_BYTES]).ljust(_RECORD_BYTES, b"\0")
        received = self._received
        self._comm.Allgather([record, MPI.BYTE], [received, MPI.BYTE])
        if problem is None and len(note) <= _INLINE_BYTES and received == record * self._size:
            return [note] * self._size
        rows = [received[i : i + _RECORD_BYTES] for i in self._starts]
        lengths = [len(note)] * len(rows)
        if problem is not None or not all([row.startswith(head) for row in rows]):
            lengths = self._compared(rows, operation, view, problem)
        return self._notes(rows, lengths, note)

    def _digest(self, operation: str, view: View) -> tuple[bytes, int, int]:
        key = operation, view
        # Loops repeat few different calls; hashing their views anew would cost more than the
        # exchange itself.
        found = self._digests.get(key)
        if found is None:
            if len(self._digests) >= 64:
                self._digests.clear()
            digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
            roots = [entry[1] for entry in view if entry[0] == "root"] or [NOBODY]
            found = self._digests[key] = digest, roots[0], getattr(view, "nbytes", 0)
        return found

    def _compared(
        self, rows: list[bytearray], operation: str, view: View, problem: BaseException | None
    ) -> list[int]:
        """The lengths of the ranks' notes where heads differ; raises if more differs than they."""
        heads = [_HEAD.unpack_from(row) for row in rows]
        if any(bad for _, _, bad, _ in heads):
            self._raise_problem(operation, problem)
        if any(other[:2] != heads[0][:2] for other in heads):
            self._raise_mismatch(operation, view)
        return [length for *_, length in heads]

    def _notes(self, rows: list[bytearray], lengths: list[int], note: bytes) -> list[bytes]:
        if max(lengths) <= _INLINE_BYTES:
            return [
                bytes(row[_HEAD.size : _HEAD.size + length])
                for row, length in zip(rows, lengths, strict=True)
            ]
        everything = np.empty(sum(lengths), np.uint8)
        if min(lengths) == max(lengths):
            self._comm.Allgather([note, MPI.BYTE], [everything, MPI.BYTE])
        else:
            self._comm.Allgatherv([note, MPI.BYTE], [everything, lengths, MPI.BYTE])
        ends = accumulate(lengths)
        return [
            everything[end - length : end].tobytes()
            for end, length in zip(ends, lengths, strict=True)
        ]

    def _raise_problem(self, operation: str, problem: BaseException | None) -> None:
        texts = self._comm.allgather(problem and describe(problem, self._comm.rank))
        raise_failure(operation, self._comm.rank, problem, texts)

    def _raise_mismatch(self, operation: str, view: View) -> None:
        views = self._comm.allgather([("operation", operation), *view])
        raise_mismatch(operation, self._comm.rank, views)


def prepare(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What ``make`` returns, and the exception it raised, for the ranks to agree on.

    Ctrl-C and `sys.exit` count too: the other ranks are about to wait for this one.
    """
    try:
        return make(), None
    except BaseException as problem:
        return None, problem
