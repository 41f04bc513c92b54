"""A file in which the ranks of a machine have their parameters, and gradients for each other."""

from __future__ import annotations

import math
import mmap
import os
import sys
from typing import NamedTuple

import numpy as np

from chainermn_comm import CommunicatorBase

from ...collective_errors import allgather_checked, raise_together
from ...nameless_files import FileReference, reserve
from ..agreement import OPERATION
from .machines import Machines

# An entry of /proc/self/pagemap has these bits in its highest byte. A page is this
# process's own if it is somewhere, and isn't the file's.
_IS_SOMEWHERE = 0b1100_0000  # in memory, or swapped out
_IS_OF_FILE = 0b0010_0000
_NOT_OWN = bytes(
    [it for it in range(256) if it & _IS_OF_FILE or not it & _IS_SOMEWHERE]
)
_ENTRY_BYTES = 8
_HIGHEST_BYTE = 7 if sys.byteorder == "little" else 0


class Form(NamedTuple):
    """A parameter as it lies in the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]


class ParameterFile:
    """The parameters of a machine, once, and a place for each of its ranks' gradients.

    A rank maps the parameters to read them, so that what its user writes there stays
    its own, as in a data set that ranks share. It maps the whole file a second time, to
    write for the other ranks.

    Attributes:
        forms: the parameters that it was made for, equal on all ranks.
        arrays: the parameters that this rank reads.
        parameters: the same parameters, flat, as this rank writes them for all.
        gradients: for each rank of the machine, flat arrays as large as the parameters.
            A rank writes the other ranks' parts of its own.
        means: the arrays in which this rank takes the means of its parts: a neighbour's
            gradients, which nobody needs there any more. The neighbour writes there in
            its next update, after all have stepped.
        machines: the ranks of this machine, and their partners on other machines.
    """

    def __init__(self, communicator: CommunicatorBase, forms: list[Form]) -> None:
        """Make a file on each machine, which its ranks map (collective)."""
        self.forms = forms
        # Each array begins at a page: if the user writes to an array, values of others
        # that arrive later must still be seen.
        begins = []
        end = 0
        for form in forms:
            begins.append(end)
            end += math.prod(form.shape) * form.dtype.itemsize
            end += -end % mmap.PAGESIZE
        nbytes = max(mmap.PAGESIZE, end)
        self._pages = nbytes // mmap.PAGESIZE
        size = nbytes * (1 + communicator.intra_size)
        self._own, shared, by_rank = _map_together(communicator, nbytes, size)
        address = np.frombuffer(self._own, np.uint8).ctypes.data
        self._first_entry = address // mmap.PAGESIZE * _ENTRY_BYTES
        self.machines = Machines(by_rank, communicator.rank)
        self.arrays = [
            np.ndarray(form.shape, form.dtype, self._own, begin)
            for form, begin in zip(forms, begins, strict=True)
        ]

        def flat_arrays(place: int) -> list[np.ndarray]:
            return [
                np.ndarray(array.size, array.dtype, shared, place * nbytes + begin)
                for array, begin in zip(self.arrays, begins, strict=True)
            ]

        here = self.machines.here
        self.parameters = flat_arrays(0)
        self.gradients = {
            rank: flat_arrays(place) for place, rank in enumerate(here, 1)
        }
        neighbour = here[here.index(communicator.rank) - 1]  # itself if it is alone
        self.means = self.gradients[neighbour]

    def has_own_writes(self) -> bool:
        """Return whether this process may have changed parameters that it should only read."""
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
                pagemap.seek(self._first_entry)
                entries = pagemap.read(self._pages * _ENTRY_BYTES)
        except OSError:  # not every kernel has it
            return True
        highest_bytes = entries[_HIGHEST_BYTE::_ENTRY_BYTES]
        own = highest_bytes.translate(None, _NOT_OWN)
        return len(highest_bytes) < self._pages or len(own) > 0

    def drop_own_writes(self) -> None:
        """Let this process read what is in the file."""
        self._own.madvise(mmap.MADV_DONTNEED)


def _map_together(
    communicator: CommunicatorBase, own_bytes: int, nbytes: int
) -> tuple[mmap.mmap, mmap.mmap, list[int]]:
    """Map a new file of each machine (collective).

    Return mappings of its beginning for this rank, and of all to share; and the machine
    of each rank.
    """
    made = []
    machine = communicator.inter_rank

    def make() -> tuple[int, FileReference | None]:
        if communicator.intra_rank > 0:
            return machine, None
        made.append(reserve(nbytes, "parameters and gradients"))
        return machine, FileReference.of(made[0])

    try:
        rows = allgather_checked(communicator, OPERATION, make)
        # Nobody closes the file before all have mapped it.
        with raise_together(communicator.handshake, OPERATION):
            for other, reference in rows:
                if other == machine and reference is not None and not made:
                    made.append(reference.open(os.O_RDWR))
            own = mmap.mmap(made[0], own_bytes, mmap.MAP_PRIVATE)
            shared = mmap.mmap(made[0], nbytes, mmap.MAP_SHARED)
            return own, shared, [other for other, _ in rows]
    finally:
        for descriptor in made:
            os.close(descriptor)
