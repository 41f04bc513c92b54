"""Counts the bytes that a rank moves: through the memory that its node shares, and in messages.

Nothing in the communicators counts. Here the window's buffers are replaced by objects
that count, and that fail wherever they would be read or written without it; so nothing
can be forgotten.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
from mpi4py import MPI

from chainermn_comm import create_communicator
from chainermn_comm.sums import shared_memory
from chainermn_comm.sums.shared_window import SharedWindow


@dataclass
class Counts:
    """Bytes that one rank moved.

    Attributes:
        written, read: in the node's shared memory.
        sent, received: in messages.
    """

    written: int = 0
    read: int = 0
    sent: int = 0
    received: int = 0

    @property
    def moved(self) -> int:
        """All of them."""
        return self.written + self.read + self.sent + self.received

    def reset(self):
        """Count from 0 again."""
        self.written = self.read = self.sent = self.received = 0


class Counted:
    """A stretch of memory that counts; only what communicators do with a window works."""

    def __init__(self, array: np.ndarray, counts: Counts):
        self._array = array
        self._counts = counts

    def __getattr__(self, name: str):
        if name not in ("dtype", "size", "nbytes"):
            raise AttributeError(f"{name} of shared memory can't be counted")
        return getattr(self._array, name)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, stretch: slice) -> Counted:
        return Counted(self._array[stretch], self._counts)

    def view(self, dtype) -> Counted:
        return Counted(self._array.view(dtype), self._counts)

    def __setitem__(self, key, value):
        self._counts.written += self._array[key].nbytes
        self._array[key] = self._plain(value)

    def __array__(self, dtype=None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._plain(self), dtype)

    def tobytes(self) -> bytes:
        return bytes(self._plain(self).data)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs, **kwargs):
        outs = kwargs.get("out")
        if outs is not None:
            kwargs["out"] = tuple(map(self._written, outs))
        result = getattr(ufunc, method)(*map(self._plain, inputs), **kwargs)
        if outs is None:
            return result
        return outs[0]

    def __array_function__(self, function, types, args, kwargs):
        if function is np.copyto:
            target, source = args
            function(self._written(target), self._plain(source), **kwargs)
        elif function in (np.concatenate, np.take):
            target = kwargs.pop("out")
            if function is np.concatenate:
                args = ([self._plain(piece) for piece in args[0]],)
            out = target
            if isinstance(target, Counted):
                out = target._array
            function(*map(self._plain, args), out=out, **kwargs)
            self._written(target)  # not if it raised, as for a cast that isn't allowed
        elif function is np.split:
            whole, count = args
            return [
                Counted(part, whole._counts) for part in np.split(whole._array, count)
            ]
        else:
            raise TypeError(f"{function.__name__} of shared memory can't be counted")

    def _plain(self, value):
        """What NumPy can read, counted as read."""
        if not isinstance(value, Counted):
            return value
        self._counts.read += value._array.nbytes
        return value._array

    def _written(self, value):
        """What NumPy can write to, counted as written."""
        if not isinstance(value, Counted):
            return value
        self._counts.written += value._array.nbytes
        return value._array


@contextmanager
def counted(name: str, comm: MPI.Intracomm, wire: str | None = None):
    """A communicator on one node, and what this rank moves by it (collective).

    Args:
        name: the communicator.
        comm: its ranks, all on one node.
        wire: in which dtype gradients travel; None for their own.
    """
    counts = Counts()

    class Window(SharedWindow):
        def __init__(self, comm: MPI.Intracomm, sizes: list[int]):
            super().__init__(comm, sizes)
            buffers = [Counted(buffer, counts) for buffer in self.buffers]
            self.buffers = buffers

    # MPI for Python makes its duplicates of the same class.
    class Messages(MPI.Intracomm):
        def Isend(self, buf, *peer: int) -> MPI.Request:
            counts.sent += _nbytes(buf)
            return super().Isend(buf, *peer)

        def Irecv(self, buf, *peer: int) -> MPI.Request:
            counts.received += _nbytes(buf)
            return super().Irecv(buf, *peer)

        def Sendrecv(self, sent, *rest):
            counts.sent += _nbytes(sent)
            counts.received += _nbytes(rest[2])  # after the peer and the tag
            super().Sendrecv(sent, *rest)

        def Allgather(self, sent, got):
            counts.sent += _nbytes(sent) * (self.size - 1)
            counts.received += _nbytes(got) - _nbytes(sent)
            super().Allgather(sent, got)

    with (
        mock.patch.object(shared_memory, "SharedWindow", Window),
        create_communicator(name, Messages(comm), wire) as communicator,
    ):
        yield communicator, counts


def _nbytes(buf) -> int:
    return memoryview(buf[0]).nbytes
