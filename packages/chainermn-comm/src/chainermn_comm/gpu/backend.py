"""Arrays on GPUs by NCCL among all ranks, on the current stream; gradients by an algorithm."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from .. import devices
from ..layout import Operand
from ..messaging import Backend, Handshake, MakeSum, Parts, ProcessGroup, messages
from ..reducer import in_background
from . import nccl
from .nccl import Arrays, NcclCommunicator
from .watcher import Watcher

OPERATION = "NCCL, moving arrays between GPUs"


class NcclBackend(Backend):
    """NCCL among the devices that are current at the first use. Sums are in NCCL's own order.

    Gradients are packed, and may go in two levels, so that an algorithm has NCCL's
    communicators of its own for them.
    """

    def __init__(self, group: ProcessGroup, make_gradient_sum: MakeSum) -> None:
        super().__init__(group, make_gradient_sum)
        self._usable: bool | None = None  # known once a rank has arrays of CuPy
        self._nccl: NcclCommunicator
        self._watcher: Watcher | None = None  # once ranks are connected

    def can_stay_on_gpu(self, arrays: Arrays, op: Any = None) -> bool:
        if self._usable is False or "cupy" not in sys.modules:
            return False
        # Work of two communicators that comes in different orders on two ranks can wait
        # for each other for ever: only one thread gives any, and none while means are
        # in the background.
        if in_background or threading.current_thread() is not threading.main_thread():
            return False
        if self._usable is None:
            self._usable = nccl.unavailable_reason() is None
        if not self._usable:
            return False
        device = devices.current_device()
        return (self._watcher is None or device == self._watcher.device) and all(
            [
                devices.device_of(array) == device
                and (op is None or nccl.sums(array.dtype, op))
                for array in arrays
            ]
        )

    def connect(self) -> bool:
        if self._watcher is None:
            made, why = nccl.connect_or_explain(self.group, OPERATION, self._connect)
            if made is not None:
                self._nccl, self._watcher = (
                    made,
                    Watcher(self.group, OPERATION, [made], made),
                )
                return True
            self._usable = False
            if self.group.rank == 0:
                print(
                    f"ChainerMN: arrays on GPUs go through host memory: {why}",
                    file=sys.stderr,
                )
        return self._watcher is not None

    def _connect(self) -> NcclCommunicator:
        # By a handshake of its own: `raise_together` shares these errors once more.
        nccl.check_devices(replace(self.group, handshake=Handshake(self.group.comm)))
        return NcclCommunicator(self.group.comm)

    def allocate(self, header: bytes) -> messages.Message:
        return messages.allocate(header, devices.empty)

    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        own = self.group.rank
        sent, received = [
            [part for part in parts if part[0] != own and part[1].size]
            for parts in (outgoing, incoming)
        ]
        with self._enqueuing((sent, received)) as stream:
            self._nccl.exchange(sent, received, stream)

    def allgather(self, outgoing: Parts, incoming: Parts) -> None:
        self.broadcast(incoming)

    def broadcast(self, parts: Parts) -> None:
        parts = [part for part in parts if part[1].size]
        with self._enqueuing(parts) as stream:
            self._nccl.broadcast(parts, stream)

    def allreduce(self, operand: Operand) -> None:
        with self._enqueuing(operand) as stream:
            self._nccl.allreduce(operand.sources, operand.targets, operand.op, stream)
            for target in operand.targets if operand.divisor != 1 else ():
                target /= operand.divisor

    def reduce_scatter(self, rows: Sequence[Arrays], targets: Arrays, op: Any) -> None:
        with self._enqueuing((rows, targets)) as stream:
            self._nccl.reduce(rows, targets, op, stream)

    def _enqueuing(self, keep: Any) -> AbstractContextManager[Any]:
        assert self._watcher is not None  # else no arrays stay on GPUs
        self._watcher.check()
        return self._watcher.enqueuing(keep)

    def close(self) -> None:
        try:
            if self._watcher is not None:
                self._watcher.finish(self._nccl.close)
        finally:
            super().close()

    def release_local(self) -> None:
        if self._watcher is not None:
            self._watcher.abandon()
        super().release_local()
