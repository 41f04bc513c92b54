"""Records what this process waits in, and inside of what: the side that every call passes."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import mmap
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from ...observers import CallObserver
from .. import status_region as layout
from ..status_region import COLLECTIVE, IDLE, MESSAGE, NOBODY

# Global names save attribute look-ups.
_call, _state, _now = layout.CALL.pack, layout.STATE_AND_TIME.pack, time.monotonic


class CallRecorder(CallObserver):
    """Records a communicator's calls: in a slot if `allocate` made it, else where nobody reads."""

    def __init__(self) -> None:
        self.detach()
        self.sequence = 0

    def collective(
        self, operation: str, number: int, root: int = NOBODY, nbytes: int = 0
    ) -> None:
        self.sequence = number
        name = operation.encode()
        # All at once: `pack_into` would write zeros first.
        self._memory[self._whole] = _call(
            COLLECTIVE, _now(), number, nbytes, root, NOBODY, name
        )

    def message(
        self, operation: str, peer: int, tag: int, nbytes: int = 0, what: str = ""
    ) -> None:
        name = (
            f"{operation}{layout.SCOPE_SEPARATOR}{what}" if what else operation
        ).encode()
        self._memory[self._whole] = _call(
            MESSAGE, _now(), self.sequence, nbytes, peer, tag, name
        )

    def leave(self) -> None:
        self._memory[self._start] = _state(IDLE, _now())

    def detach(self) -> None:
        self.attach(bytearray(layout.SLOT_BYTES), 0, None)

    def attach(self, memory: Any, offset: int, slot: int | None) -> None:
        self._memory, self._slot, start = memory, slot, offset + layout.IDENTITY.size
        self._whole = slice(start, start + layout.CALL.size)
        self._start = slice(start, start + layout.STATE_AND_TIME.size)

    def release(self) -> None:
        slot = self._slot
        self.detach()
        if slot is not None and _region is not None:
            layout.IDENTITY.pack_into(
                _region.memory, layout.offset_of(slot), 0, 0, 0, 0
            )
            _region.free_slots.append(slot)


@contextlib.contextmanager
def watch_call(operation: str, size: int = 1) -> Iterator[None]:
    """Record a call of ``size`` ranks that belongs to no communicator, as those within may.

    Nothing is recorded before the first communicator is about to be made.
    """
    record = CallRecorder() if _region is None else allocate(layout.WORLD, 0, size)
    record.collective(operation, 0)
    try:
        yield
    finally:
        record.release()


def count_update(num_examples: int) -> None:
    """Count a call of `update` for `chainermn top`; 0 examples if their number isn't known."""
    if _region is not None:
        updates, examples = layout.PROGRESS.unpack(_region.memory[layout.PROGRESS_AT])
        made = layout.PROGRESS.pack(updates + 1, examples + num_examples)
        _region.memory[layout.PROGRESS_AT] = made


def mark_aborting() -> None:
    """Report to the monitor that this process calls MPI_Abort."""
    if _region is not None:
        layout.HEADER.pack_into(_region.memory, 0, _region.used_slots, _now())


def mark_finalizing() -> None:
    """Report to the monitor that this process ends on purpose or is about to call MPI_Finalize."""
    if _region is not None:
        allocate(layout.WORLD, 0, 1).collective(layout.FINALIZE, 0)


# mpi4py calls MPI_Finalize after all exit functions. Since they are called in reverse
# order, this one is registered as early as can be: those that take long are no wait in
# MPI_Finalize.
atexit.register(mark_finalizing)


@dataclass
class StatusRegion:
    """What the monitor reads of this process, and how it reaches the process."""

    memory: mmap.mmap  # see `status_region`
    file: int  # descriptor of the memory
    stacks: int  # descriptor of the file where stacks are written
    signal: int  # at which they are
    namespace: int  # of its number
    # Only this process has the second end open; nobody writes.
    liveness_pipe: tuple[int, int]
    free_slots: list[int] = field(default_factory=list)  # of those ever used
    used_slots: int = 0  # number of slots ever used
    is_monitored: bool = False


_region: StatusRegion | None = None
_records: WeakSet[CallRecorder] = WeakSet()


def region() -> StatusRegion:
    """Return this process's status region, made at the first call; OSError where none can be."""
    global _region
    if _region is None:
        file, stacks = (
            _anonymous_file("chainermn-calls"),
            _anonymous_file("chainermn-stacks"),
        )
        os.ftruncate(file, layout.REGION_BYTES)
        # Real-time signals: SIGUSR1 and SIGUSR2 are the scripts' and the schedulers'.
        numbers = range(signal.SIGRTMAX - 5, signal.SIGRTMIN, -1)
        number = next(
            (one for one in numbers if signal.getsignal(one) is signal.SIG_DFL), None
        )
        if number is None:
            raise OSError("no signal is free")
        faulthandler.register(number, file=stacks, all_threads=True, chain=False)
        if not faulthandler.is_enabled():  # a crash shows the Python line, too
            faulthandler.enable(2, all_threads=False)
        namespace = os.stat("/proc/self/ns/pid").st_ino
        memory = mmap.mmap(file, layout.REGION_BYTES)
        _region = StatusRegion(memory, file, stacks, number, namespace, os.pipe())
    return _region


def allocate(communicator: tuple[int, int], rank: int, size: int) -> CallRecorder:
    """Return a recorder with a slot that the monitor reads, if one is free; see `Call`."""
    record, mine = CallRecorder(), region()
    slot = mine.free_slots.pop() if mine.free_slots else mine.used_slots
    if slot == layout.SLOTS:
        return record
    offset = layout.offset_of(slot)
    record.attach(mine.memory, offset, slot)
    record.collective("", 0)
    record.leave()
    layout.IDENTITY.pack_into(mine.memory, offset, *communicator, rank, size)
    if slot == mine.used_slots:
        mine.used_slots += 1
        layout.HEADER.pack_into(mine.memory, 0, mine.used_slots, 0.0)
    _records.add(record)
    return record


def _anonymous_file(name: str) -> int:
    """Return a new file in memory, which goes when nobody has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # Python was built on an older glibc, as conda's is.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)


def _reset_in_child() -> None:
    """Detach a forked child: what it calls is not its parent's."""
    global _region
    if _region is not None:
        with contextlib.suppress(OSError):
            os.close(_region.liveness_pipe[1])
    _region = None
    for record in list(_records):
        record.detach()


os.register_at_fork(after_in_child=_reset_in_child)
