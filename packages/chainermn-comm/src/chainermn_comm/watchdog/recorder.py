"""Notes what this process waits in: the side of the watchdog that every call passes."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from weakref import WeakSet

from .status_region import (
    AREA_BYTES,
    CALL,
    COLLECTIVE,
    EVERYBODY,
    FINALIZE,
    FIRST_VERSION,
    HEADER,
    IDENTITY,
    INSIDE,
    LEFT,
    MESSAGE,
    NOBODY,
    OUTSIDE,
    SLOT_BYTES,
    SLOTS,
    USED,
    VERSION,
    VERSION_AT,
    offset_of,
)

Method = TypeVar("Method", bound=Callable[..., Any])

_mark, _now = VERSION.pack_into, time.monotonic


class Record:
    """Where the calls of one communicator are noted; on its own, nowhere that anybody reads."""

    __slots__ = ("__weakref__", "_memory", "_offset", "_slot", "_version", "sequence")

    def __init__(self) -> None:
        self._memory: Any = bytearray(SLOT_BYTES)
        self._offset = IDENTITY.size
        self._slot: int | None = None
        self._version = FIRST_VERSION
        self.sequence = 0

    def collective(
        self, operation: str, sequence: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        """Note that this process is about to wait in a collective call."""
        self.sequence = sequence
        name = encoded(operation)
        self._write(CALL, COLLECTIVE, _now(), sequence, nbytes, root, NOBODY, name)

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, inside: str = ""
    ) -> None:
        """Note that this process is about to wait for one other, inside of some function."""
        name = _with_function(operation, inside) if inside else encoded(operation)
        self._write(CALL, MESSAGE, _now(), self.sequence, nbytes, peer, tag, name)

    def leave(self) -> None:
        """Note that it waits no longer."""
        self._write(LEFT, OUTSIDE, _now())

    def _write(self, form: struct.Struct, *values: Any) -> None:
        """Write so that the monitor doesn't take half of it for the whole.

        `pack_into` writes zeros first. Whatever interrupts, the version is even in the end.
        """
        memory, offset = self._memory, self._offset
        version = self._version | 1
        try:
            _mark(memory, offset + CALL.size, version)
            form.pack_into(memory, offset, *values)
        finally:
            self._version = version + 1
            _mark(memory, offset + CALL.size, version + 1)

    def release(self) -> None:
        """Give the slot back: the communicator has been finalized."""
        slot, self._slot = self._slot, None
        self._forget()
        if slot is not None and _area is not None:
            IDENTITY.pack_into(_area.memory, offset_of(slot), 0, 0, 0, 0)
            _area.free.append(slot)

    def _forget(self) -> None:
        self._memory, self._offset, self._slot = bytearray(SLOT_BYTES), IDENTITY.size, None


def watched(method: Method) -> Method:
    """A method of a communicator that waits; ``self._record`` is where it is noted.

    When the waiting begins, and for what, is noted where the ranks meet.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        finally:
            self._record.leave()

    return cast(Method, call)


def aborting() -> None:
    """Tell the monitor that this process calls MPI_Abort."""
    if _area is not None:
        HEADER.pack_into(_area.memory, 0, _area.used, _now())


def leaving() -> None:
    """Tell the monitor that this process ends on purpose, after MPI_Finalize."""
    if _area is not None:
        take(EVERYBODY, 0, 1).collective(FINALIZE, 0)


@dataclass
class Area:
    """What the monitor reads of this process.

    Attributes:
        process: whose it is.
        memory: see `records`.
        file: of the memory.
        stacks: the file where stacks are written.
        signal: at which they are.
        life: a pipe that only this process has open to write, and to which it never writes.
        free: slots that have been given back.
        used: slots ever used.
        watched: whether some monitor knows of it.
    """

    process: int
    memory: mmap.mmap
    file: int
    stacks: int
    signal: int
    life: tuple[int, int]
    free: list[int]
    used: int = 0
    watched: bool = False


_area: Area | None = None
_records: WeakSet[Record] = WeakSet()


def area() -> Area:
    """This process's area, made at the first call.

    Raises:
        OSError: no file can be made.
    """
    global _area
    if _area is None:
        file, stacks = _nameless("chainermn-calls"), _nameless("chainermn-stacks")
        os.ftruncate(file, AREA_BYTES)
        number = _unused_signal()
        faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        memory = mmap.mmap(file, AREA_BYTES)
        _area = Area(os.getpid(), memory, file, stacks, number, os.pipe(), [])
        os.register_at_fork(after_in_child=_forget_all)
        atexit.register(_ending, take(EVERYBODY, 0, 1), os.getpid())
    return _area


def take(communicator: tuple[int, int], rank: int, size: int) -> Record:
    """A record that the monitor reads, if there is a slot for it."""
    record, mine = Record(), area()
    if mine.free:
        slot = mine.free.pop()
    elif mine.used < SLOTS:
        slot = mine.used
    else:
        return record
    start = offset_of(slot)
    CALL.pack_into(mine.memory, start + IDENTITY.size, OUTSIDE, _now(), 0, 0, NOBODY, NOBODY, b"")
    VERSION.pack_into(mine.memory, start + VERSION_AT, FIRST_VERSION)
    IDENTITY.pack_into(mine.memory, start, *communicator, rank, size)
    if slot == mine.used:
        mine.used += 1
        USED.pack_into(mine.memory, 0, mine.used)
    record._memory, record._offset, record._slot = mine.memory, start + IDENTITY.size, slot
    _records.add(record)
    return record


def _nameless(name: str) -> int:
    """A new file in memory, which goes when nobody has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # Python was built on an older glibc, as conda's is.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)


def _unused_signal() -> int:
    # Real-time signals: SIGUSR1 and SIGUSR2 are the scripts' and the schedulers'.
    for number in range(signal.SIGRTMAX - 5, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            return number
    raise OSError("no signal is free")


def _forget_all() -> None:
    """In a forked child: what it calls is not its parent's."""
    global _area
    if _area is not None:
        with contextlib.suppress(OSError):
            os.close(_area.life[1])
    _area = None
    for record in list(_records):
        record._forget()


def _ending(record: Record, process: int) -> None:
    if os.getpid() == process:
        record.collective(FINALIZE, 0)


@functools.lru_cache(maxsize=1024)  # some name ranks and tags
def encoded(text: str) -> bytes:
    """The text as it is noted."""
    return text.encode()


@functools.lru_cache(maxsize=1024)
def _with_function(operation: str, function: str) -> bytes:
    return f"{operation}{INSIDE}{function}".encode()
