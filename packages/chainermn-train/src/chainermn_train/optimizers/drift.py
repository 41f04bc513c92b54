"""A detector of ranks whose parameters or optimizer state have drifted apart.

In each update ranks compare a checksum of one slice, in the next one that of the slice
that follows; a turn goes through all. The checksum rides in the synchronization that is
there anyway.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from chainermn_comm.gpu import devices, staging

from ..host_arrays import to_host
from ..slots import is_array, master_of

# Bytes of a slice, which takes some ten microseconds, and most slices: of a large model
# they are longer. Adler-32 needs no table; that of CRC-32 takes as much of the caches
# as the slice.
SLICE_BYTES = 2 << 10
MOST_SLICES = 1000
# A small model's turn is one update. Its arrays are listed again after so many.
UPDATES_OF_A_LIST = 64
_VALUE = "value"
_MASTER = "float32 value"
_COUNTS = struct.Struct("<qq")


class Part(NamedTuple):
    """A part of an array that belongs to a parameter; the array is looked up when it is read."""

    param: Any
    key: str  # _VALUE, _MASTER, or that of the update rule's state
    start: int
    stop: int

    def elements(self) -> Any:
        """Return the part's elements, in C order, 1-D, on the array's device."""
        array = _array_of(self.param, self.key)
        if type(array) is not np.ndarray and devices.on_gpu(array):
            flat = devices.c_ordered(array).reshape(-1)
        elif array.flags.c_contiguous:
            flat = array.reshape(-1)
        else:
            flat = array.flat
        return flat[self.start : self.stop]


class _Copy(NamedTuple):
    """A part on its way to the host."""

    source: Any  # kept until it is copied
    host: Any  # an array
    event: Any  # which happens then


class DriftDetector:
    """Where one optimizer is in its turn."""

    def __init__(self) -> None:
        # Of the next slice's parts, if they are on GPUs.
        self._copies: list[_Copy] = []
        self.restart()

    def __deepcopy__(self, memo: dict[int, Any]) -> DriftDetector:
        return DriftDetector()

    def restart(self) -> None:
        """Begin anew, as all ranks have the same state."""
        self._wait()
        self._slices: list[list[Part]] = []
        self._next = 0  # the slice that is compared next
        self._listed_at = 0  # updates when the arrays were listed
        self._began_at = 0  # updates when the turn began
        self.equal_at = 0  # updates when all was equal last: the turn before began

    def checksum(self, params: Sequence[Any], steps: int) -> int:
        """Return the checksum of the next slice of these parameters, after so many steps."""
        # The first step makes momenta: a list that was made before lacks them.
        if steps > 0 and self._listed_at == 0:
            self._slices = []
        if self._next >= len(self._slices):
            self._begin_turn(params, steps)
        copies = self._copies
        self._wait()
        value = zlib.adler32(_COUNTS.pack(steps, self._next))
        for number, part in enumerate(self._slices[self._next]):
            elements = copies[number].host if copies else to_host(part.elements())
            updates = getattr(part.param.update_rule, "t", 0)
            value = zlib.adler32(elements, (value + updates) & 0xFFFFFFFF)
        return value

    def advance(self) -> None:
        """Go on to the next slice, as ranks have the same."""
        self._next += 1
        if self._next < len(self._slices):
            parts = self._slices[self._next]
            if any([devices.on_gpu(part.param.array) for part in parts]):
                # They come to the host while the step computes.
                self._copies = [_begin_copy(part.elements()) for part in parts]

    def _wait(self) -> None:
        if self._copies:
            staging.wait([each.event for each in self._copies if each.event])
            self._copies = []

    def _begin_turn(self, params: Sequence[Any], steps: int) -> None:
        self._wait()
        self._next = 0
        self.equal_at = self._began_at
        self._began_at = steps
        if not self._slices or steps >= self._listed_at + UPDATES_OF_A_LIST:
            self._slices = _slices_of(params)
            self._listed_at = steps


def _array_of(param: Any, key: str) -> Any:
    """Return the array of that key; one of no elements if it is gone."""
    if key == _VALUE:
        array = param.array
    elif key == _MASTER:
        array = master_of(param)
    else:
        array = (param.update_rule.state or {}).get(key)
    return np.empty(0) if array is None else array


def _slices_of(params: Sequence[Any]) -> list[list[Part]]:
    """Cut all arrays of parameters into slices of equal length."""
    arrays = []
    for param in params:
        state = getattr(param.update_rule, "state", None) or {}
        moments = [key for key in sorted(state) if is_array(state[key])]
        for key in [_VALUE, _MASTER, *moments]:
            whole = Part(param, key, 0, 0)
            arrays.append((whole, _array_of(param, key)))
    total = sum([array.nbytes for _, array in arrays])
    most = max(SLICE_BYTES, -(-total // MOST_SLICES))
    slices: list[list[Part]] = [[]]
    room = most
    for whole, array in arrays:
        start = 0
        while start < array.size:
            if room < array.itemsize:
                slices.append([])
                room = most
            stop = min(array.size, start + room // array.itemsize)
            slices[-1].append(whole._replace(start=start, stop=stop))
            room -= (stop - start) * array.itemsize
            start = stop
    return slices


def _begin_copy(source: Any) -> _Copy:
    if not devices.on_gpu(source):
        return _Copy(source, source.copy(), None)
    with devices.using_device_of(source):
        host = devices.pinned(source.nbytes)
        devices.copy(source.view(np.uint8), host, devices.current_stream())
        return _Copy(source, host, devices.recorded_event())
