"""Copies arrays between GPUs and host memory through page-locked buffers: many at once, few waits.

All copies of a batch are queued before the host waits, each in the order of its device's current
stream. Large arrays pass through two buffers: one is emptied while the other is filled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from . import devices
from .arithmetic import as_bytes
from .errors import CommunicationError, PeerError
from .runtime import wait_until

# Of each buffer. Long beside what a copy costs to begin; page-locked memory is the whole machine's.
BUFFER_BYTES = 32 << 20
_SMALLEST_BYTES = 4 << 10
# Arrays and buffers of calls that failed: a device may still copy between them.
_orphaned: list[Any] = []


class Piece(NamedTuple):
    """A part of an array's bytes, and where it lies in the buffer."""

    which: int  # of the arrays
    start: int
    stop: int
    offset: int


def to_host(arrays: Sequence[Any], rank: int) -> list[np.ndarray]:
    """Return copies in host memory, in C or Fortran order as the originals if they have either.

    CommunicationError, whose text names ``rank``, is raised where CUDA fails.
    """
    with devices.translated_errors(f"rank {rank}: copying GPU arrays to host memory"):
        flats, copies = [], []
        for array in arrays:
            is_f = array.flags.f_contiguous and not array.flags.c_contiguous
            flats.append(flat(array.T if is_f else array))
            copies.append(np.empty(array.shape, array.dtype, "F" if is_f else "C"))
        hosts = list(map(as_bytes, copies))
        batches = cut([each.nbytes for each in flats])
        with buffers(flats) as held:
            waiting: list[tuple[list[Any], list[Piece], np.ndarray]] = []
            for number in range(len(batches) + 1):
                if number < len(batches):
                    batch, buffer = batches[number], held[number % len(held)]
                    waiting.append((start(batch, flats, buffer, into_buffer=True), batch, buffer))
                if number:
                    events, batch, buffer = waiting.pop(0)
                    wait(events)
                    start(batch, hosts, buffer, into_buffer=False)
    return copies


def to_device(arrays: Sequence[np.ndarray], rank: int) -> list[Any]:
    """Return complete copies of contiguous arrays on the current device, in the same orders.

    CommunicationError, whose text names ``rank``, is raised where CUDA fails, or this process can't
    use a GPU.
    """
    reason = devices.unavailable_reason()
    if reason is not None:
        raise CommunicationError(
            f"rank {rank}: an array that was sent from a GPU can't be put on one here: {reason}"
        )
    with devices.translated_errors(f"rank {rank}: copying arrays to a GPU"):
        orders = ["C" if array.flags.c_contiguous else "F" for array in arrays]
        pairs = zip(arrays, orders, strict=True)
        copies = [devices.empty(array.shape, array.dtype, order) for array, order in pairs]
        pairs = zip(copies, orders, strict=True)
        flats = [flat(copy.T if order == "F" else copy) for copy, order in pairs]
        hosts = list(map(as_bytes, arrays))
        batches = cut([each.nbytes for each in flats])
        with buffers(flats) as held:
            waiting: list[list[Any]] = []
            for number, batch in enumerate(batches):
                if len(waiting) == len(held):
                    wait(waiting.pop(0))
                buffer = held[number % len(held)]
                start(batch, hosts, buffer, into_buffer=True)
                waiting.append(start(batch, flats, buffer, into_buffer=False))
            for events in waiting:
                wait(events)
    return copies


def assign(target: Any, array: np.ndarray, rank: int) -> None:
    """Overwrite a GPU array, of any strides, by a contiguous array; raise as :func:`to_device`."""
    with (
        devices.translated_errors(f"rank {rank}: copying an array to a GPU"),
        devices.using_device_of(target),
    ):
        overwrite(target, to_device([array], rank)[0])


def overwrite(target: Any, array: Any) -> None:
    """Overwrite a GPU array by another one of its shape and device, and wait for it."""
    with devices.using_device_of(target):
        devices.assign(target, array)
        wait([devices.recorded_event()])


def wait(events: Sequence[Any]) -> None:
    """Wait until recorded events have happened; raise CUDA's error where one never will."""
    wait_until(lambda: all(map(devices.is_done, events)))


def flat(array: Any) -> Any:
    """Return the array's elements in C order, 1-D; a copy only if it isn't C-contiguous."""
    if not devices.on_gpu(array):
        return np.ascontiguousarray(array).reshape(-1)
    with devices.using_device_of(array):
        return devices.contiguous(array)


def cut(sizes: Iterable[int]) -> list[list[Piece]]:
    """Cut arrays of ``sizes`` bytes into batches that fill a buffer; an empty one has no piece."""
    batches: list[list[Piece]] = []
    filled = BUFFER_BYTES
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if filled == BUFFER_BYTES:
                batches.append([])
                filled = 0
            end = min(size, begin + BUFFER_BYTES - filled)
            batches[-1].append(Piece(index, begin, end, filled))
            filled += end - begin
            begin = end
    return batches


@contextlib.contextmanager
def buffers(flats: Sequence[Any], count: int = 2) -> Iterator[list[np.ndarray]]:
    """Use at most ``count`` buffers for the batches of :func:`cut`; one if one batch is all.

    They are page-locked if some array is on a GPU. Their sizes are powers of two, so that CuPy's
    pool, which keeps what was used, keeps few.
    """
    nbytes = sum(each.nbytes for each in flats)
    size = min(BUFFER_BYTES, max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length()))
    make = devices.pinned if any(map(devices.on_gpu, flats)) else partial(np.empty, dtype=np.uint8)
    held = [make(size) for _ in range(1 if nbytes <= size else count)]
    try:
        yield held
    except PeerError:  # of another rank, while nothing is under way here
        raise
    except BaseException:
        _orphaned.append((held, list(flats)))
        raise


def start(
    batch: Sequence[Piece], flats: Sequence[Any], buffer: np.ndarray, into_buffer: bool
) -> list[Any]:
    """Copy pieces of 1-D arrays to the buffer, or out of it if not ``into_buffer``.

    Those of GPU arrays are only queued: the events that are returned happen after them.
    """
    events = []
    for device, pieces in groupby(batch, lambda piece: devices.device_of(flats[piece.which])):
        with contextlib.nullcontext() if device is None else devices.use(device):
            stream = None if device is None else devices.current_stream()
            for which, begin, end, offset in pieces:
                part = flats[which].view(np.uint8)[begin:end]
                place = buffer[offset : offset + end - begin]
                if stream is None:
                    np.copyto(*((place, part) if into_buffer else (part, place)))
                elif into_buffer:
                    devices.copy_to_host(part, place, stream)
                else:
                    devices.copy_to_device(place, part, stream)
            if stream is not None:
                events.append(devices.recorded_event())
    return events
