"""Copies between GPUs and host memory, through page-locked buffers of limited size.

The copies of a chunk are queued together, in the order of the current stream, before the
host waits for them. While the host works with one of two buffers, the device fills or
empties the other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import CommunicationError
from ..layout import Chunk, plan_chunks
from ..numbers import as_bytes
from ..runtime import wait_until
from . import devices

# Bytes of each buffer: enough to hide what it costs to begin a copy, and not more,
# since page-locked memory is shared by the whole machine.
BUFFER_BYTES = 32 << 20
# Buffers and arrays of calls that failed: a device may still copy between them.
_orphaned: list[Any] = []

# Reads or fills a chunk's buffer (size,) in host memory.
Work: TypeAlias = Callable[[Chunk, np.ndarray], None]


def to_host(arrays: Sequence[Any], rank: int) -> list[np.ndarray]:
    """Return copies in host memory of arrays in C or Fortran order, in the same orders.

    If CUDA fails, CommunicationError is raised, whose text names ``rank``.
    """
    with devices.translated_errors(f"rank {rank}: copying GPU arrays to host memory"):
        copies = [np.empty(array.shape, array.dtype, _order(array)) for array in arrays]
        hosts = list(map(as_bytes, copies))

        def store(chunk: Chunk, buffer: np.ndarray) -> None:
            for index, span, place in chunk.segments:
                hosts[index][span] = buffer[place]

        _wait_for_other_devices(arrays)
        chunks = _chunks_of(hosts)
        sources = list(map(_gpu_bytes, arrays))
        through_buffers(chunks, buffers_for(chunks), store, sources=sources)
    return copies


def to_device(arrays: Sequence[np.ndarray], rank: int) -> list[Any]:
    """Return complete copies of contiguous arrays on the current device, in the same orders.

    If CUDA fails or this process can't use a GPU, CommunicationError is raised, whose
    text names ``rank``.
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
        hosts = list(map(as_bytes, arrays))

        def load(chunk: Chunk, buffer: np.ndarray) -> None:
            for index, span, place in chunk.segments:
                buffer[place] = hosts[index][span]

        chunks = _chunks_of(hosts)
        targets = list(map(_gpu_bytes, copies))
        through_buffers(chunks, buffers_for(chunks), load, targets=targets)
    return copies


def through_buffers(
    chunks: Sequence[Chunk],
    buffers: Sequence[np.ndarray],
    work: Work,
    sources: Sequence[Any] = (),
    targets: Sequence[Any] = (),
) -> None:
    """For each chunk fill a buffer from ``sources``, call ``work``, and copy to ``targets``.

    Sources and targets are lists of 1-D arrays on GPUs. Sources are empty if ``work``
    fills the buffer, and targets if nothing is copied back. :func:`buffers_for` makes
    ``buffers``. At the end all copies are over.
    """
    # For each buffer the event after which the device is done with it; None if it is free.
    copied: list[list[Any]] = [[] for _ in buffers]

    def fill(number: int) -> None:
        if sources and number < len(chunks):
            slot = number % len(buffers)
            copied[slot] = [_copy(chunks[number], sources, buffers[slot], False)]

    try:
        fill(0)
        for number, chunk in enumerate(chunks):
            slot = number % len(buffers)
            # The next chunk is copied while the host works on this one.
            fill(number + 1)
            wait(copied[slot])
            work(chunk, _part_for(chunk, buffers[slot]))
            if targets:
                copied[slot] = [_copy(chunk, targets, buffers[slot], True)]
        for events in copied:
            wait(events)
    except BaseException:
        _orphaned.append((buffers, sources, targets))
        raise


def _copy(
    chunk: Chunk, flats: Sequence[Any], buffer: np.ndarray, to_device: bool
) -> Any:
    """Queue the copies between a chunk's arrays and a buffer; return the event after them."""
    stream = devices.current_stream()
    buffer = _part_for(chunk, buffer)
    for index, span, place in chunk.segments:
        array = flats[index][span]
        part = buffer[place]
        if to_device:
            devices.copy(part, array, stream)
        else:
            devices.copy(array, part, stream)
    return devices.recorded_event()


def wait(events: Sequence[Any]) -> None:
    """Wait until recorded events have happened; raise CUDA's error if the work has failed."""
    wait_until(lambda: all(map(devices.is_done, events)))


def buffers_for(chunks: Sequence[Chunk]) -> list[np.ndarray]:
    """Return one page-locked buffer for one chunk, or two for several; each chunk fits in each.

    Their size is a power of two, so that CuPy's pool, which keeps used buffers, keeps few
    sizes.
    """
    nbytes = max([chunk.nbytes for chunk in chunks], default=0)
    size = 1 << (nbytes - 1).bit_length()
    return [devices.pinned(size) for _ in chunks[:2]]


def _part_for(chunk: Chunk, buffer: np.ndarray) -> np.ndarray:
    return buffer[: chunk.nbytes].view(chunk.dtype)


def _chunks_of(hosts: Sequence[np.ndarray]) -> list[Chunk]:
    """Divide arrays of bytes into chunks, each of which fills a buffer."""
    sizes = tuple([host.size for host in hosts])
    dtypes = tuple([host.dtype for host in hosts])
    return plan_chunks(sizes, dtypes, BUFFER_BYTES)


def _wait_for_other_devices(arrays: Sequence[Any]) -> None:
    """Let the current stream wait for the streams of other devices that hold arrays."""
    stream = devices.current_stream()
    for device in {array.device.id for array in arrays} - {devices.current_device()}:
        with devices.use(device):
            event = devices.recorded_event()
        stream.wait_event(event)


def _order(array: Any) -> Literal["C", "F"]:
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        return "F"
    return "C"


def _gpu_bytes(array: Any) -> Any:
    """Return the bytes of an array on a GPU, in the order of :func:`_order`."""
    if _order(array) == "F":
        array = array.T
    return array.reshape(-1).view(np.uint8)
