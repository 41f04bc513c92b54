"""A detector of ranks whose parameters or optimizer state have drifted apart.

A cursor goes through all arrays again and again. In each update ranks compare a checksum
of the elements at the cursor, which travels in the handshake that an update needs anyway.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from chainermn_comm.gpu import devices, staging

from ..host_arrays import to_host
from ..slots import entries_of, is_array, master_of, numbers_of

# A part has this number of bytes, so that its checksum takes some microseconds. An array
# has at most the second number of parts, which are then larger. The checksum is Adler-32,
# because the table of CRC-32 takes as much of the caches as a part.
PART_BYTES = 2 << 10
MOST_PARTS = 1000


class Part(NamedTuple):
    """Some elements of one of a parameter's arrays."""

    param: Any
    elements: Any  # 1-D, in C order, on any device


class DriftDetector:
    """The cursor of one optimizer."""

    def __init__(self) -> None:
        self._event: Any = None  # when a copy of elements on a GPU has been made
        self.restart()

    def __deepcopy__(self, memo: dict[int, Any]) -> DriftDetector:
        return DriftDetector()

    def restart(self) -> None:
        """Begin the first turn again: all ranks have the same state now."""
        self._wait()
        self._turn: Iterator[Part] = iter(())
        self._part: Part | None = None  # at the cursor, once it is looked up
        self._began_at = 0  # updates when the turn began
        self.equal_at = 0  # updates when all was equal last: the turn before began

    def checksum(self, params: Sequence[Any], steps: int) -> int:
        """Return the checksum of the elements at the cursor, after this number of steps."""
        if self._part is None:
            self._part = next(self._turn, None)
        if self._part is None:
            self._turn = parts_of(params)
            self._part = next(self._turn, None)
            self.equal_at = self._began_at
            self._began_at = steps
        if self._part is None:  # no parameter has values
            return 0
        self._wait()
        rule = self._part.param.update_rule
        own = getattr(rule, "hyperparam", None)
        facts = {
            "steps": steps,
            "rule": numbers_of(rule),
            "own": numbers_of(own),
            "optimizer": numbers_of(getattr(own, "parent", None)),
        }
        checksum = zlib.adler32(repr(entries_of(facts)).encode())
        return zlib.adler32(to_host(self._part.elements), checksum)

    def advance(self) -> None:
        """Move the cursor to the next part: ranks have compared this one."""
        part = self._part
        self._part = None
        if part is None or not devices.on_gpu(part.param.array):
            return
        # The next elements come to the host while the step computes.
        part = next(self._turn, None)
        if part is not None and devices.on_gpu(part.elements):
            source = part.elements
            with devices.using_device_of(source):
                host = devices.pinned(source.nbytes)
                devices.copy(source.view(np.uint8), host, devices.current_stream())
                self._event = devices.recorded_event()
            part = Part(part.param, host)
        self._part = part

    def _wait(self) -> None:
        if self._event is not None:
            staging.wait([self._event])
            self._event = None


def parts_of(params: Sequence[Any]) -> Iterator[Part]:
    """Yield the parts of all arrays of parameters; each array is looked up for each part."""
    total = sum([getattr(get(), "nbytes", 0) for _, get in _getters_of(params)])
    nbytes = max(PART_BYTES, total // MOST_PARTS)
    for param, get in _getters_of(params):
        start = 0
        array = get()
        while array is not None and start < array.size:
            stop = start + max(1, nbytes // array.itemsize)
            # In C order, which doesn't depend on the order in memory.
            if array.flags.c_contiguous or devices.on_gpu(array):
                elements = array.ravel()
            else:
                elements = array.flat  # without a copy of all elements
            yield Part(param, elements[start:stop])
            start = stop
            array = get()


def _getters_of(params: Sequence[Any]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Yield each parameter with each function that returns an array of it, or None."""
    for param in params:
        yield param, partial(getattr, param, "array")
        yield param, partial(master_of, param)
        # A rule has no state before its first step.
        state = getattr(param.update_rule, "state", None) or {}
        for key in sorted(state):
            if is_array(state[key]):
                yield param, partial(state.get, key)
