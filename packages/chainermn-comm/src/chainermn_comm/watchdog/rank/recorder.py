"""Records the call that this process waits in, for the monitor to read."""

from __future__ import annotations

import atexit
import faulthandler
import mmap
import os
import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from ...observers import CallObserver
from .. import status_region as layout
from ..status_region import COLLECTIVE, IDLE, MESSAGE, NOBODY

# Global names save attribute look-ups.
_call = layout.CALL.pack
_state = layout.STATE_AND_TIME.pack
_now = time.monotonic


class CallRecorder(CallObserver):
    """Records a communicator's calls, which the monitor reads if `allocate` has given a slot."""

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
        if what:
            operation = f"{operation}{layout.SCOPE_SEPARATOR}{what}"
        name = operation.encode()
        self._memory[self._whole] = _call(
            MESSAGE, _now(), self.sequence, nbytes, peer, tag, name
        )

    def leave(self, error: BaseException | None = None) -> None:
        self._memory[self._start] = _state(IDLE, _now())

    def detach(self) -> None:
        """From now on, write records to memory that no monitor reads."""
        self.attach(bytearray(layout.SLOT_BYTES), 0)

    def attach(self, memory: Any, slot: int) -> None:
        """Record in the slot that begins at ``slot``; 0 stands for memory outside the region."""
        self._memory = memory
        self._slot = slot
        start = slot + layout.IDENTITY.size
        self._whole = slice(start, start + layout.CALL.size)
        self._start = slice(start, start + layout.STATE_AND_TIME.size)

    def release(self) -> None:
        if self._slot:
            layout.IDENTITY.pack_into(self._memory, self._slot, 0, 0, 0)
            region().free_slots.append(self._slot)
        self.detach()


def count_update(num_examples: int) -> None:
    """Count a call of `update` for `chainermn top`; 0 examples if their number isn't known."""
    if _region is not None:
        aborted_at, updates, examples = layout.HEADER.unpack_from(_region.memory)
        _region.memory[layout.HEADER_AT] = layout.HEADER.pack(
            aborted_at, updates + 1, examples + num_examples
        )


def mark_aborting() -> None:
    """Report to the monitor that this process calls MPI_Abort."""
    if _region is not None:
        _, *progress = layout.HEADER.unpack_from(_region.memory)
        layout.HEADER.pack_into(_region.memory, 0, _now(), *progress)


def mark_finalizing() -> None:
    """Report to the monitor that this process ends on purpose or is about to call MPI_Finalize."""
    if _region is not None:
        allocate(layout.WORLD, 0, 1).collective(layout.FINALIZE, 0)


# mpi4py calls MPI_Finalize after all exit functions, which run in reverse order. So this
# function is registered as early as possible: a slow exit function is no wait in
# MPI_Finalize.
atexit.register(mark_finalizing)


@dataclass
class StatusRegion:
    """The memory of this process that the monitor reads."""

    memory: mmap.mmap  # see `status_region`
    file: int  # descriptor of the memory
    stacks: int  # descriptor of the file where stacks are written
    free_slots: list[int]  # where free slots begin, the last slot first


_region: StatusRegion | None = None
_records: WeakSet[CallRecorder] = WeakSet()


def region() -> StatusRegion:
    """Return this process's status region, made at the first call; OSError if that fails."""
    global _region
    if _region is None:
        file = _anonymous_file("chainermn-calls")
        stacks = _anonymous_file("chainermn-stacks")
        os.ftruncate(file, layout.REGION_BYTES)
        faulthandler.register(
            layout.STACKS_SIGNAL, file=stacks, all_threads=True, chain=False
        )
        if not faulthandler.is_enabled():  # then a crash shows the Python line, too
            faulthandler.enable(2, all_threads=False)
        memory = mmap.mmap(file, layout.REGION_BYTES)
        _region = StatusRegion(memory, file, stacks, [*reversed(layout.SLOTS_AT)])
    return _region


def allocate(communicator: int, rank: int, size: int) -> CallRecorder:
    """Return a recorder with a slot that the monitor reads, if one is free; see `Call`."""
    record = CallRecorder()
    mine = region()
    if mine.free_slots:
        slot = mine.free_slots.pop()
        record.attach(mine.memory, slot)
        record.collective("", 0)
        record.leave()
        layout.IDENTITY.pack_into(mine.memory, slot, communicator, rank, size)
        _records.add(record)
    return record


def _anonymous_file(name: str) -> int:
    """Return a new file in memory, which vanishes when no process has it open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # Python was built on an older glibc, as conda's is.
    return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)


def _reset_in_child() -> None:
    """Detach a forked child, whose calls are not its parent's."""
    global _region
    _region = None
    for record in list(_records):
        record.detach()


os.register_at_fork(after_in_child=_reset_in_child)
