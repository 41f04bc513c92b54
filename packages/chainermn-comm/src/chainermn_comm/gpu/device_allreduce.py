"""Means of gradients on GPUs by NCCL, in each node and between nodes.

Chunks are packed, summed and unpacked on three streams, each beside its neighbours. A
chunk has a slot, with a buffer, from when it is packed until it is unpacked. Each event
is recorded before the next chunk's work is enqueued on the stream, so that nothing
waits for more than it needs.

A call only enqueues that, and the current stream waits for its end; a :class:`Watcher`
looks after it. Where NCCL or CUDA fails, then or later, the job ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .. import devices
from ..layout import Chunk, Operand, plan_chunks
from ..messaging import Algorithm, ProcessGroup
from . import kernels
from .communicators import Communicators
from .staged import OPERATION, flatten
from .watcher import Watcher

# NCCL wants tens of megabytes to reach its bandwidth; not measured, as that takes
# several GPUs.
CHUNK_BYTES = 32 << 20
# While NCCL sums a chunk, the one before is unpacked and the one after packed.
SLOTS = 3
# Calls whose shapes are known to fit on all ranks.
MOST_KNOWN = 4096
# A loop's gradients often lie where those of the step before lay, or alternate between
# few places. With `overlap` a step makes a call for each MiB of them. Most plans take
# some kilobytes.
PLANS = 1024


class Plan(NamedTuple):
    """How gradients that lie at some addresses are cut, and what the kernels walk, by chunk."""

    chunks: list[Chunk]
    to_pack: list[Any]  # tables on the device
    to_unpack: list[Any]
    host: np.ndarray  # pinned: what is copied to the device


class PreparedCall(NamedTuple):
    """What one call needs; all of it must live until its work is over."""

    plan: Plan
    inputs: list[Any]  # what is read, 1-D and contiguous
    # What is written, likewise; the same arrays where that is the same memory.
    flats: list[Any]
    buffers: list[Any]  # one for each slot
    divisor: int


class DeviceAllreduce(Algorithm):
    """Means over a group's ranks, on the device that is current when this is made."""

    def __init__(self, group: ProcessGroup, communicators: Communicators) -> None:
        """Own the communicators, which are connected (collective)."""
        self._group, self._communicators = group, communicators
        self._chunk_bytes = group.settings.chunk_bytes or CHUNK_BYTES
        self._known: set[Any] = set()
        self._slot = 0  # of the next chunk
        self._plan = lru_cache(PLANS)(self._make_plan)
        with group.together(OPERATION):
            self._allocate()
        self._watcher = Watcher(group, OPERATION, communicators.nccls, self)

    def _allocate(self) -> None:
        # The last stream's work is over last.
        self._streams = self._pack, self._sum, self._unpack = [
            devices.new_stream() for _ in range(3)
        ]
        self._packed, self._summed, self._unpacked = [
            [devices.new_event() for _ in range(SLOTS)] for _ in range(3)
        ]
        self._begun = devices.new_event()
        self._buffers = [devices.empty(0)] * SLOTS

    def allreduce(self, operand: Operand) -> None:
        group = self._group
        if _key(operand) not in self._known:
            with group.together(OPERATION):
                run = self.prepare(operand)
        else:
            with self._watcher.ending():
                run = self.prepare(operand)
        run()

    def prepare(self, operand: Operand) -> Callable[[], None]:
        assert operand.op is np.add, "gradients are summed"
        self._watcher.check()
        with devices.use(self._watcher.device):
            inputs, flats = flatten(operand, self._watcher.device)
            self._wait_for_current_stream()
            places = kernels.places(inputs), kernels.places(flats)
            plan = self._plan(*places, tuple(operand.wire_dtypes))
            packed = [
                chunk for chunk in plan.chunks if self._target(chunk, flats) is None
            ]
            nbytes = max(map(self._padded_bytes, packed), default=0)
            # Smaller buffers that are replaced live on until the calls before have ended.
            if self._buffers[0].nbytes < nbytes:
                self._buffers = [devices.empty(nbytes) for _ in self._buffers]
        call = PreparedCall(plan, inputs, flats, self._buffers, operand.divisor)

        def rest() -> None:
            with self._watcher.enqueuing(call, self._unpack):
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known.add(_key(operand))
                self._wait_for_current_stream()
                for number, chunk in enumerate(plan.chunks):
                    self._run_chunk(call, number, chunk)

        return rest

    def _make_plan(
        self,
        sources: kernels.Places,
        targets: kernels.Places,
        wires: tuple[np.dtype, ...],
    ) -> Plan:
        """Return the plan; its tables come to the device in the order of the packing stream."""
        sizes = tuple([size for _, size, _ in targets])
        chunks = plan_chunks(sizes, wires, self._chunk_bytes)
        rows = [kernels.segment_table(chunks, places) for places in (sources, targets)]
        host, device = (
            devices.pinned(2 * rows[0].nbytes),
            devices.empty(2 * rows[0].nbytes),
        )
        np.concatenate(rows, out=host.view(np.int64).reshape(-1, 3))
        devices.copy(host, device, self._pack)
        lengths = [(len(chunk.segments) + 1) * kernels.ROW_BYTES for chunk in chunks]
        tables = [device[start:] for start in accumulate([0, *lengths, *lengths[:-1]])]
        return Plan(chunks, tables[: len(chunks)], tables[len(chunks) :], host)

    def _wait_for_current_stream(self) -> None:
        self._begun.record(devices.current_stream())
        self._pack.wait_event(self._begun)

    def _run_chunk(self, call: PreparedCall, number: int, chunk: Chunk) -> None:
        slot, self._slot = self._slot, (self._slot + 1) % len(call.buffers)
        target = summed = self._target(chunk, call.flats)
        if target is None:
            # The bits of bfloat16, which not every CuPy has.
            dtype = np.uint16 if chunk.dtype.name == "bfloat16" else chunk.dtype
            summed = call.buffers[slot][: self._padded_bytes(chunk)].view(dtype)
            self._pack.wait_event(self._unpacked[slot])
        index, _, _ = chunk.segments[0]
        divisor, count = call.divisor, len(chunk.segments)
        if target is None or divisor > 1 or call.inputs[index] is not call.flats[index]:
            with self._pack:
                table = call.plan.to_pack[number]
                kernels.launch(
                    "pack", chunk.dtype, table, count, summed, chunk.size, divisor
                )
        self._packed[slot].record(self._pack)
        self._sum.wait_event(self._packed[slot])
        self._communicators.sum_in_place(summed, chunk.size, self._sum)
        # Before the next chunk's sum is enqueued, for which unpacking must not wait.
        self._summed[slot].record(self._sum)
        self._unpack.wait_event(self._summed[slot])
        if target is None:
            with self._unpack:
                table = call.plan.to_unpack[number]
                kernels.launch("unpack", chunk.dtype, table, count, summed, chunk.size)
            self._unpacked[slot].record(self._unpack)

    def _target(self, chunk: Chunk, flats: list[Any]) -> Any | None:
        """Return the chunk's target if it is summed there; None if it has to be packed."""
        index, start, stop = chunk.segments[0]
        is_padded = chunk.size % self._communicators.shards > 0
        if len(chunk.segments) > 1 or flats[index].dtype != chunk.dtype or is_padded:
            return None
        return flats[index][start:stop]

    def _padded_bytes(self, chunk: Chunk) -> int:
        """Return the bytes of a buffer with equal shards."""
        shards = self._communicators.shards
        return -(-chunk.size // shards) * shards * chunk.dtype.itemsize

    def release_local(self) -> None:
        if self._watcher.abandon(self._streams):
            self._release()
            self._communicators.release_local()

    def close(self) -> None:
        self._watcher.finish(self._communicators.close)
        self._release()

    def _release(self) -> None:
        self._buffers = []
        self._plan.cache_clear()


def _key(operand: Operand) -> Any:
    """Return what is equal on all ranks of a call, and determines how it is cut."""
    sizes = tuple([(target.size, target.dtype) for target in operand.targets])
    return sizes, tuple(operand.wire_dtypes)
