"""Copies arrays between GPUs and host memory through page-locked buffers: many at once, few waits.

All copies of a batch are queued before the host waits, each in the order of its
device's current stream. Large arrays pass through two buffers: one is emptied while the
other is filled.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle, groupby
from typing import Any, Literal, NamedTuple

import numpy as np

from . import devices
from .errors import CommunicationError, PeerError
from .numbers import as_bytes
from .runtime import wait_until

# Of each buffer. Long beside what a copy costs to begin; page-locked memory is the
# whole machine's.
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
        copies = [np.empty(array.shape, array.dtype, _order(array)) for array in arrays]
        _copy(arrays, copies, to_device=False)
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
        _copy(copies, arrays, to_device=True)
    return copies


def _order(array: Any) -> Literal["C", "F"]:
    return "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"


def _copy(
    on_gpu: Sequence[Any], on_host: Sequence[np.ndarray], to_device: bool
) -> None:
    """Copy arrays from GPUs to contiguous ones, or back ``to_device``, and wait for it."""
    flats = [flat(array.T if _order(array) == "F" else array) for array in on_gpu]
    hosts = list(map(as_bytes, on_host))
    with buffers(flats) as held:
        under_way: deque[tuple[list[Piece], np.ndarray, list[Any]]] = deque()

        def finish_first() -> None:
            batch, buffer, events = under_way.popleft()
            wait(events)
            if not to_device:
                start(batch, hosts, buffer, into_buffer=False)

        for batch, buffer in zip(
            cut([each.nbytes for each in flats]), cycle(held), strict=False
        ):
            if len(under_way) == len(held):
                finish_first()
            if to_device:
                start(batch, hosts, buffer, into_buffer=True)
            events = start(batch, flats, buffer, into_buffer=not to_device)
            under_way.append((batch, buffer, events))
        while under_way:
            finish_first()


def overwrite(target: Any, array: Any) -> None:
    """Overwrite a GPU array by another one of its shape and device, and wait for it."""
    with devices.using_device_of(target):
        target[...] = array
        wait([devices.recorded_event()])


def wait(events: Sequence[Any]) -> None:
    """Wait until recorded events have happened; raise CUDA's error where one never will."""
    wait_until(lambda: all(map(devices.is_done, events)))


def flat(array: Any) -> Any:
    """Return the array's elements in C order, 1-D; a copy only if it isn't C-contiguous."""
    if not devices.on_gpu(array):
        return np.ascontiguousarray(array).reshape(-1)
    with devices.using_device_of(array):
        return devices.c_ordered(array).reshape(-1)


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

    They are page-locked if some array is on a GPU. Their sizes are powers of two, so
    that CuPy's pool, which keeps what was used, keeps few.
    """
    nbytes = sum(each.nbytes for each in flats)
    size = min(BUFFER_BYTES, max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length()))
    make = (
        devices.pinned
        if any(map(devices.on_gpu, flats))
        else partial(np.empty, dtype=np.uint8)
    )
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
    for device, pieces in groupby(
        batch, lambda piece: devices.device_of(flats[piece.which])
    ):
        with contextlib.nullcontext() if device is None else devices.use(device):
            stream = None if device is None else devices.current_stream()
            for which, begin, end, offset in pieces:
                part = flats[which].view(np.uint8)[begin:end]
                place = buffer[offset : offset + end - begin]
                source, target = (part, place) if into_buffer else (place, part)
                if stream is None:
                    np.copyto(target, source)
                else:
                    devices.copy(source, target, stream)
            if stream is not None:
                events.append(devices.recorded_event())
    return events
