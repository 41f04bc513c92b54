"""A file in which the ranks of a machine have their parameters, and gradients for each other."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chainermn_comm import CommunicatorBase

from ...collective_errors import bcast_checked, raise_together
from ...nameless_files import LINE_BYTES, FileReference, reserve
from ..agreement import OPERATION

# Bits of an entry of /proc/self/pagemap: whether a page is there, or was swapped out,
# and whether the page is the file's.
_IS_THERE = np.uint64(0b11 << 62)
_IS_OF_FILE = np.uint64(1 << 61)
_ENTRY_BYTES = 8


class Form(NamedTuple):
    """A parameter as it lies in the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


class ParameterFile:
    """The parameters of a machine, once, and a place for each of its ranks' gradients.

    A rank maps the parameters to read them, so that what its user writes there stays
    its own, as in a data set that ranks share. It maps the whole file a second time, to
    write for the other ranks.

    Attributes:
        forms: the parameters that it was made for, equal on all ranks.
        arrays: the parameters that this rank reads.
        parameters: the same parameters, flat, as this rank writes them for all.
        gradients: for each rank, flat arrays as large as the parameters.
    """

    def __init__(self, node: CommunicatorBase, forms: Sequence[Form]) -> None:
        """Make a file that the ranks of ``node``, all on one machine, map (collective)."""
        self.forms = list(forms)
        begins = [0]  # of each array, and where all end
        for form in forms:
            lines = -(-form.size * form.dtype.itemsize // LINE_BYTES)
            begins.append(begins[-1] + lines * LINE_BYTES)
        self._pages = max(1, -(-begins[-1] // mmap.PAGESIZE))
        nbytes = self._pages * mmap.PAGESIZE
        self._own, shared = _map_together(node, nbytes, nbytes * (1 + node.size))

        def flat_arrays(mapping: mmap.mmap, place: int) -> list[np.ndarray]:
            return [
                np.ndarray(form.size, form.dtype, mapping, place * nbytes + begin)
                for form, begin in zip(forms, begins, strict=False)
            ]

        self.arrays = [
            flat.reshape(form.shape)
            for form, flat in zip(forms, flat_arrays(self._own, 0), strict=True)
        ]
        self.parameters = flat_arrays(shared, 0)
        self.gradients = [flat_arrays(shared, 1 + rank) for rank in range(node.size)]

    def has_own_writes(self) -> bool:
        """Return whether this process has changed parameters that it should only read."""
        address = np.frombuffer(self._own, np.uint8).ctypes.data
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                pagemap.seek(address // mmap.PAGESIZE * _ENTRY_BYTES)
                entries = np.frombuffer(
                    pagemap.read(self._pages * _ENTRY_BYTES), np.uint64
                )
        except OSError:  # not every kernel has it
            entries = np.zeros(0, np.uint64)
        if len(entries) < self._pages:
            return not all(map(_have_equal_bits, self.arrays, self.parameters))
        is_own = (entries & _IS_THERE > 0) & (entries & _IS_OF_FILE == 0)
        return bool(is_own.any())

    def drop_own_writes(self) -> None:
        """Let this process read what is in the file."""
        self._own.madvise(mmap.MADV_DONTNEED)


def _map_together(
    node: CommunicatorBase, own_bytes: int, nbytes: int
) -> tuple[mmap.mmap, mmap.mmap]:
    """Return mappings of a new file (collective): its beginning for itself, and all to share."""
    made = []

    def make() -> FileReference:
        made.append(reserve(nbytes, "parameters and gradients"))
        return FileReference.of(made[0])

    try:
        reference = bcast_checked(node, OPERATION, make)
        # Nobody closes the file before all have mapped it.
        with raise_together(node.handshake, OPERATION):
            if not made:
                made.append(reference.open(os.O_RDWR))
            own = mmap.mmap(made[0], own_bytes, mmap.MAP_PRIVATE)
            return own, mmap.mmap(made[0], nbytes, mmap.MAP_SHARED)
    finally:
        for descriptor in made:
            os.close(descriptor)


def _have_equal_bits(array: Any, flat: Any) -> bool:
    return bool(array.tobytes() == flat.tobytes())
