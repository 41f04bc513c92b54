"""Copies between GPUs and host memory, through page-locked buffers of limited size.

The copies of a batch are queued together, each in the order of its device's current
stream, before the host waits for them. While the host works with one of two buffers,
the device fills or empties the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import CommunicationError
from ..numbers import as_bytes
from ..runtime import wait_until
from . import devices

# Of each buffer. Long beside what a copy costs to begin; page-locked memory is the
# whole machine's.
BUFFER_BYTES = 32 << 20
# Sizes of buffers are powers of two from here on, so that CuPy's pool, which keeps what
# was used, keeps few.
_SMALLEST_BYTES = 4 << 10
# Buffers and arrays of calls that failed: a device may still copy between them.
_orphaned: list[Any] = []


@dataclass(frozen=True)
class Piece:
    """A part of an array's bytes, and where it lies in the buffer."""

    index: int  # of the array
    start: int
    stop: int
    offset: int

    def of(self, flat: Any) -> Any:
        """Return the piece of that 1-D array, as bytes."""
        return flat.view(np.uint8)[self.start : self.stop]

    def inside(self, buffer: np.ndarray) -> np.ndarray:
        """Return the piece's place in a buffer."""
        return buffer[self.offset : self.offset + self.stop - self.start]


# What passes through a buffer together.
Batch: TypeAlias = Sequence[Piece]
# Reads or fills a buffer in host memory.
Work: TypeAlias = Callable[[Batch, np.ndarray], None]


def to_host(arrays: Sequence[Any], rank: int) -> list[np.ndarray]:
    """Return copies in host memory, in C or Fortran order as the originals if they have either.

    CommunicationError, whose text names ``rank``, is raised where CUDA fails.
    """
    with devices.translated_errors(f"rank {rank}: copying GPU arrays to host memory"):
        copies = [np.empty(array.shape, array.dtype, _order(array)) for array in arrays]
        _copy_all(arrays, copies, to_device=False)
    return copies


def to_device(arrays: Sequence[np.ndarray], rank: int) -> list[Any]:
    """Return complete copies of contiguous arrays on the current device, in the same orders.

    CommunicationError, whose text names ``rank``, is raised where CUDA fails, or this
    process can't use a GPU.
    """
    reason = devices.unavailable_reason()
    if reason is not None:
        raise CommunicationError(
            f"rank {rank}: an array that was sent from a GPU can't be put on one here: {reason}"
        )
    with devices.translated_errors(f"rank {rank}: copying arrays to a GPU"):
        copies = [
            devices.empty(array.shape, array.dtype, _order(array)) for array in arrays
        ]
        _copy_all(copies, arrays, to_device=True)
    return copies


def _copy_all(
    on_gpu: Sequence[Any], on_host: Sequence[np.ndarray], to_device: bool
) -> None:
    """Copy arrays from GPUs to contiguous ones, or back ``to_device``, and wait for it."""
    flats = list(map(_in_memory_order, on_gpu))
    hosts = list(map(as_bytes, on_host))
    batches = cut([each.nbytes for each in flats])

    def move(batch: Batch, buffer: np.ndarray) -> None:
        for piece in batch:
            place = piece.inside(buffer)
            part = piece.of(hosts[piece.index])
            if to_device:
                np.copyto(place, part)
            else:
                np.copyto(part, place)

    buffers = buffers_for(batches)
    if to_device:
        through_buffers(batches, buffers, move, targets=flats)
    else:
        through_buffers(batches, buffers, move, sources=flats)


def through_buffers(
    batches: Sequence[Batch],
    buffers: Sequence[np.ndarray],
    work: Work,
    sources: Sequence[Any] = (),
    targets: Sequence[Any] = (),
) -> None:
    """Fill a buffer from ``sources``, let ``work`` use it, copy it to ``targets``; batch by batch.

    Sources and targets are 1-D arrays on GPUs, or empty where a buffer is not filled, or
    not copied, by the device. Several batches take two buffers. All copies are over at
    the end.
    """
    # Of each buffer: events after which the device is done with it.
    copies: list[list[Any]] = [[] for _ in buffers]

    def fill(number: int) -> None:
        if sources and number < len(batches):
            slot = number % len(buffers)
            copies[slot] += _copy(batches[number], sources, buffers[slot], True)

    try:
        fill(0)
        for number, batch in enumerate(batches):
            slot = number % len(buffers)
            fill(number + 1)  # while the host works on this one
            wait(copies[slot])
            copies[slot].clear()
            work(batch, buffers[slot])
            if targets:
                copies[slot] += _copy(batch, targets, buffers[slot], False)
        for events in copies:
            wait(events)
    except BaseException:
        _orphaned.append((buffers, sources, targets))
        raise


def _copy(
    batch: Batch, flats: Sequence[Any], buffer: np.ndarray, into_buffer: bool
) -> list[Any]:
    """Queue the copies of a batch; return events that happen after them, one for each device."""
    used = set()
    for piece in batch:
        array = flats[piece.index]
        with devices.using_device_of(array):
            part = piece.of(array)
            place = piece.inside(buffer)
            stream = devices.current_stream()
            if into_buffer:
                devices.copy(part, place, stream)
            else:
                devices.copy(place, part, stream)
        used.add(array.device.id)
    events = []
    for device in used:
        with devices.use(device):
            events.append(devices.recorded_event())
    return events


def wait(events: Sequence[Any]) -> None:
    """Wait until recorded events have happened; raise CUDA's error where one never will."""
    wait_until(lambda: all(map(devices.is_done, events)))


def flat(array: Any) -> Any:
    """Return the array's elements in C order, 1-D; a copy only if it isn't C-contiguous."""
    if devices.on_gpu(array):
        return devices.c_ordered(array).reshape(-1)
    return np.ascontiguousarray(array).reshape(-1)


def cut(sizes: Iterable[int]) -> list[list[Piece]]:
    """Cut arrays of ``sizes`` bytes into batches that fill a buffer; an empty one has no piece."""
    batches: list[list[Piece]] = []
    filled = BUFFER_BYTES
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            if filled == BUFFER_BYTES:
                batches.append([])
                filled = 0
            stop = min(size, start + BUFFER_BYTES - filled)
            batches[-1].append(Piece(index, start, stop, filled))
            filled += stop - start
            start = stop
    return batches


def buffers_for(batches: Sequence[Batch]) -> list[np.ndarray]:
    """Return page-locked buffers in which each batch fits: one for one batch, else two."""
    ends = [
        piece.offset + piece.stop - piece.start for batch in batches for piece in batch
    ]
    nbytes = max(ends, default=0)
    size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
    return [devices.pinned(size) for _ in batches[:2]]


def _order(array: Any) -> Literal["C", "F"]:
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _in_memory_order(array: Any) -> Any:
    """Return the elements of an array on a GPU, 1-D, in the order of :func:`_order`."""
    if _order(array) == "F":
        array = array.T
    return flat(array)
