"""A stand-in for a GPU: memory, streams and events, which can fail, and kernels in NumPy.

Device memory is host memory that NumPy can't read as an array. Work on a stream happens
later, in the stream's order and no other, while some thread asks for an event; every
piece of work can be delayed.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

MEMORY_BYTES = 1 << 34
# Within which all that is queued must happen, or be aborted: nothing may wait for ever.
LIMIT_SECONDS = 100.0
NOT_READY = 600
OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
WORDS = {
    OUT_OF_MEMORY: "cudaErrorMemoryAllocation: out of memory",
    NOT_READY: "cudaErrorNotReady: device not ready",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress: an illegal memory access was encountered",
}


class CUDARuntimeError(RuntimeError):
    __module__ = "cupy_backends.cuda.api.runtime"

    def __init__(self, status: int):
        self.status = status
        super().__init__(WORDS[status])


class Gpu:
    """The state of one process's device: its memory, its streams, and how it misbehaves."""

    def __init__(self, rank: int):
        self.rank = rank
        self.count = 1  # devices that CUDA finds
        self.bus_id = f"0000:{rank:02x}:00.0"
        self.delay = 3  # a piece of work is put off up to so many times
        self.version = 22203  # NCCL's
        # Work of NCCL never ends, and it says that there is an error.
        self.nccl_fails = False
        self.nccl_works_for: Any = None  # the communicator whose work has begun
        self.closed = False  # nobody uses it any more: what hangs ends
        self.random = random.Random(rank)
        self.memory: dict[int, int] = {}  # device allocations: address and bytes
        self.pinned: dict[int, int] = {}
        self.streams: list[Stream] = []
        self.events: weakref.WeakValueDictionary[int, Event] = (
            weakref.WeakValueDictionary()
        )
        self.calls: list[str] = []  # NCCL's operations, and kernels by name
        self.made: list[str] = []  # every call that can fail, in this order
        self.copied_to_host = 0  # bytes
        self.packed: list[int] = []  # bytes of each chunk
        # Times that a thread of the user's asked again for what wasn't done.
        self.host_waits = 0
        self.status = 0  # CUDA's error of queued work, which all later calls get, too
        self.lock = threading.RLock()
        self._planted: dict[str, tuple[int, Exception]] = {}
        self._numbers = itertools.count(1)
        self._local = threading.local()

    # What fails.

    def plant(self, call: str, error: Exception | int = OUT_OF_MEMORY, after: int = 0):
        """Let a call fail once it was made so many times more; of queued work `"work"`."""
        if isinstance(error, int):
            error = CUDARuntimeError(error)
        self._planted[call] = after, error

    @property
    def planted(self) -> list[str]:
        """What was planted and has not happened yet."""
        return list(self._planted)

    def recover(self) -> bool:
        """Let the device be right again; return whether all that was planted has happened."""
        happened = not self._planted
        self._planted.clear()
        self.status = 0
        return happened

    def reach(self, call: str):
        """Be at a call that can fail; raise what was planted there."""
        with self.lock:
            self._local.asked = None
            self.made.append(call)
            if self.status:
                raise CUDARuntimeError(self.status)
            after, error = self._planted.get(call, (0, None))
            if error is not None:
                del self._planted[call]
                if after == 0:
                    raise error
                self._planted[call] = after - 1, error

    def query(self, event: Event) -> int:
        """CUDA's status of an event; a little work is done meanwhile."""
        asked = getattr(self._local, "asked", None)
        try:
            self.reach("eventQuery")
            for _ in range(4):
                self.step()
        except CUDARuntimeError as error:
            return error.status
        if self.status:
            return self.status
        if event.happened == event.recorded:
            return 0
        self._local.asked = event
        if (
            asked is event
            and threading.current_thread().name != "chainermn-gpu-watcher"
        ):
            self.host_waits += 1
        return NOT_READY

    # What is current in a thread.

    @property
    def current(self) -> list[Stream]:
        """Streams made current, the last one last."""
        found = self._local.__dict__.setdefault("streams", [])
        return found

    @property
    def current_device(self) -> int:
        return int(getattr(self._local, "device", 0))

    @current_device.setter
    def current_device(self, device: int):
        self._local.device = device

    # Work.

    def step(self):
        """Try one piece of work of some stream."""
        with self.lock:
            busy = [stream for stream in self.streams if stream.queue]
            if not busy or self.status:
                return
            stream = self.random.choice(busy)
            if stream.queue[0]():
                stream.queue.popleft()
                if "work" in self._planted:
                    try:
                        self.reach("work")
                    except CUDARuntimeError as error:
                        self.fail(error.status)

    def fail(self, status: int):
        """Do no work any more: each later call gets this error."""
        self.status = status
        for stream in self.streams:
            stream.queue.clear()

    def drain(self, stream: Stream):
        end = time.monotonic() + LIMIT_SECONDS
        while stream.queue:
            assert time.monotonic() < end, f"it never ends: {stream.queue[0]}"
            self.step()
        if self.status:
            raise CUDARuntimeError(self.status)

    def put(self, stream: Stream, work: Callable[[], bool]):
        """Add work that is tried again until it returns True."""
        with self.lock:
            left = self.random.randint(0, self.delay)

            def later() -> bool:
                nonlocal left
                if left > 0:
                    left -= 1
                    return False
                return work()

            stream.queue.append(later)

    def stream_at(self, ptr: int) -> Stream:
        return next(stream for stream in self.streams if stream.ptr == ptr)

    def bytes_at(self, address: int, nbytes: int, pinned: bool = False) -> np.ndarray:
        """Memory that must have been allocated, and still be."""
        known = self.memory
        kind = "device"
        if pinned:
            known = self.pinned
            kind = "pinned"
        inside = [
            start <= address <= start + size - nbytes
            for start, size in known.copy().items()
        ]
        assert any(inside), f"{nbytes} bytes at {address:#x} are no {kind} memory"
        return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)

    def number(self, event: Event) -> int:
        ptr = next(self._numbers)
        self.events[ptr] = event
        return ptr


class Stream:
    def __init__(self, gpu: Gpu, ptr: int):
        if ptr:
            gpu.reach("streamCreate")
        self.gpu = gpu
        self.ptr = ptr
        self.queue: deque[Callable[[], bool]] = deque()
        gpu.streams.append(self)

    def wait_event(self, event: Event):
        self.gpu.reach("streamWaitEvent")
        with self.gpu.lock:
            version = event.recorded
            self.queue.append(lambda: event.happened >= version)

    def synchronize(self):
        raise AssertionError("a blind wait: poll an event instead")

    def __enter__(self) -> Stream:
        self.gpu.current.append(self)
        return self

    def __exit__(self, *_):
        self.gpu.current.pop()


class Event:
    def __init__(self, gpu: Gpu):
        gpu.reach("eventCreate")
        self.gpu = gpu
        self.ptr = gpu.number(self)
        self.recorded = self.happened = 0
        self.time = 0.0  # in seconds, when it happened

    def record(self, stream: Stream | None = None):
        self.gpu.reach("eventRecord")
        if stream is None:
            stream = current_stream(self.gpu)
        with self.gpu.lock:
            self.recorded += 1
            version = self.recorded

            def happen() -> bool:
                self.happened = version
                self.time = time.perf_counter()
                return True

            stream.queue.append(happen)

    @property
    def done(self) -> bool:
        """As CuPy's: it doesn't tell an error from work that isn't over."""
        return self.gpu.query(self) == 0

    def synchronize(self):
        raise AssertionError("a blind wait: poll `done` instead")


class Allocation:
    """Device memory, freed when nobody refers to it any more."""

    def __init__(self, gpu: Gpu, nbytes: int):
        gpu.reach("malloc")
        self.bytes = np.full(max(nbytes, 1), 0xCD, np.uint8)
        address = self.bytes.ctypes.data
        gpu.memory[address] = max(nbytes, 1)
        weakref.finalize(self, gpu.memory.pop, address, None)


def current_stream(gpu: Gpu) -> Stream:
    if gpu.current:
        return gpu.current[-1]
    return gpu.streams[0]


def allocate_pinned(gpu: Gpu, size: int):
    gpu.reach("hostAlloc")
    memory = np.full(size, 0xAB, np.uint8)
    gpu.pinned[memory.ctypes.data] = size
    weakref.finalize(memory, gpu.pinned.pop, memory.ctypes.data, None)
    return memory


# What the kernels of `chainermn_comm.gpu.kernels` do.

# Bits of bfloat16 lie in uint16.
WIRE_DTYPES = {"e": "f2", "f": "f4", "d": "f8", "b": "u2"}


def cast(values: np.ndarray, dtype, divisor: float = 1.0) -> np.ndarray:
    """Divide in float32, or in float64 where either side has it, and round once."""
    if values.dtype == np.uint16:
        values = from_bfloat16(values)
    if dtype == np.uint16:
        target = np.dtype(np.float32)
    else:
        target = np.dtype(dtype)
    wide = np.promote_types(np.promote_types(values.dtype, target), np.float32)
    with np.errstate(all="ignore"):
        result = (values.astype(wide) / wide.type(divisor)).astype(target)
    if dtype == np.uint16:
        return to_bfloat16(result)
    return result


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 numbers, given by their bits (uint16), as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The bits (uint16) of the bfloat16 next to each float32, the even one of two."""
    lower = values.view(np.uint32) >> np.uint32(16)  # rounded towards zero
    rest = values.view(np.uint32) & np.uint32(0xFFFF)
    up = (rest > 0x8000) | ((rest == 0x8000) & (lower % 2 == 1))
    quiet = lower | np.uint32(0x40)
    bits = np.where(np.isnan(values), quiet, lower + up)
    return bits.astype(np.uint16)


def run_kernel(
    name: str,
    bytes_at: Callable[[int, int], np.ndarray],
    table: int,
    count: int,
    buffer: int,
    size: int,
    divisor: float,
):
    """Run the kernel of that name on memory that ``bytes_at`` gives for (address, bytes)."""
    operation, _, letter = name.partition("_")
    width = np.dtype(WIRE_DTYPES[letter]).itemsize
    wire = bytes_at(buffer, size * width).view(WIRE_DTYPES[letter])
    whole = bytes_at(table, (count + 1) * 24)
    rows = whole.view(np.int64).reshape(-1, 3)
    assert rows[0, 0] == 0
    assert rows[count, 0] == size
    for (begin, address, itemsize), end in zip(rows[:count], rows[1:, 0], strict=True):
        if end > begin:
            nbytes = int((end - begin) * itemsize)
            grad = bytes_at(int(address), nbytes).view(f"f{itemsize}")
            if operation == "pack":
                wire[begin:end] = cast(grad, wire.dtype, divisor)
            else:
                grad[...] = cast(wire[begin:end], grad.dtype)
