"""Users' arrays on GPUs by NCCL among all ranks, on the current stream."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from .. import devices
from ..errors import CommunicationError, SharedFailure
from ..messaging import DeviceBackend, Handshake, Parts, ProcessGroup, messages
from ..reducer import in_background
from . import nccl
from .nccl import NcclCommunicator
from .watcher import Watcher

OPERATION = "NCCL, moving arrays between GPUs"


class NcclBackend(DeviceBackend):
    """NCCL among the devices that are current at the first use. Sums are in NCCL's own order."""

    def __init__(self, group: ProcessGroup) -> None:
        """Do nothing yet (not collective)."""
        self._group = group
        self._device = -1
        self._connected: tuple[NcclCommunicator, Watcher] | None = None
        self._usable: bool | None = None  # known once a rank has arrays of CuPy

    def takes(self, arrays: Sequence[Any], op: Any = None) -> bool:
        if self._usable is False or "cupy" not in sys.modules:
            return False
        # Work of two communicators that comes in different orders on two ranks can wait for each
        # other for ever: only one thread gives any, and none while means are in the background.
        if in_background or threading.current_thread() is not threading.main_thread():
            return False
        if self._usable is None:
            self._usable = nccl.can_exchange()
        device = devices.current_device() if self._usable else None
        return (
            self._usable
            and (self._connected is None or device == self._device)
            and all(
                [
                    devices.device_of(array) == device
                    and (op is None or nccl.sums(array.dtype, op))
                    for array in arrays
                ]
            )
        )

    def connect(self) -> bool:
        if self._connected is None:
            group, why, made = self._group, "", None
            with SharedFailure(group.handshake, OPERATION):
                try:
                    # By a handshake of its own, whose errors are this one's for `SharedFailure`.
                    nccl.check_devices(replace(group, handshake=Handshake(group.comm)))
                    made = NcclCommunicator(group.comm)
                except (CommunicationError, ValueError) as error:
                    why = str(error)
            rows = group.handshake(OPERATION, payload=why.encode())
            reasons = [row.decode() for row in rows if row]
            if made is not None and not reasons:
                self._device = devices.current_device()
                self._connected = made, Watcher(group, self._device, made, OPERATION)
                self._connected[1].nccls = [made]
                return True
            self._usable = False
            if made is not None:
                made.abort()
            if group.rank == 0:
                told = f"ChainerMN: arrays on GPUs go through host memory: {reasons[0]}"
                print(told, file=sys.stderr)
        return self._connected is not None

    def allocate(self, header: bytes) -> messages.Message:
        return messages.allocate(header, devices.new_array)

    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        own = self._group.rank
        sent, received = [
            [part for part in parts if part[0] != own and part[1].size]
            for parts in (outgoing, incoming)
        ]
        with self._enqueuing((sent, received)) as (made, stream):
            made.exchange(sent, received, stream)

    def allgather(self, outgoing: Parts, incoming: Parts) -> None:
        self.broadcast(incoming)

    def broadcast(self, parts: Parts) -> None:
        parts = [part for part in parts if part[1].size]
        with self._enqueuing(parts) as (made, stream):
            made.broadcast(parts, stream)

    def allreduce(
        self, sources: Sequence[Any], targets: Sequence[Any], op: Any, divisor: int = 1
    ) -> None:
        with self._enqueuing((sources, targets)) as (made, stream):
            if divisor != 1:
                for source, target in zip(sources, targets, strict=True):
                    devices.divide(source, divisor, target)
                sources = targets
            made.allreduce_each(sources, targets, op, stream)

    def reduce_scatter(
        self, rows: Sequence[Sequence[Any]], targets: Sequence[Any], op: Any
    ) -> None:
        with self._enqueuing((rows, targets)) as (made, stream):
            made.reduce_each(rows, targets, op, stream)

    @contextmanager
    def _enqueuing(self, keep: Any) -> Iterator[tuple[NcclCommunicator, Any]]:
        assert self._connected is not None
        made, watcher = self._connected
        with watcher.ending(keep), devices.use(self._device):
            watcher.look()
            watcher.start_call()
            stream = devices.current_stream()
            yield made, stream
            over = watcher.end_call(stream, keep)
            if not watcher.has_thread:
                watcher.wait(partial(devices.is_done, over))

    def close(self) -> None:
        if self._connected is not None:
            made, watcher = self._connected
            with watcher.ending(), devices.use(self._device):
                watcher.finish()
                made.close()

    def release_local(self) -> None:
        if self._connected is not None:
            with suppress(Exception), devices.use(self._device):
                self._connected[1].abandon([devices.current_stream()])
