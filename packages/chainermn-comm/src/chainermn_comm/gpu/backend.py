"""Users' arrays on GPUs by NCCL among all ranks, on the current stream."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from .. import devices
from ..errors import CommunicationError, is_raised_on_all, now
from ..messaging import Context, DeviceBackend, Parts, Takes, messages
from . import nccl
from .nccl import NcclCommunicator
from .watcher import Watcher

OPERATION = "NCCL, moving arrays between GPUs"
# Held by whoever gives NCCL work while another thread may. Work of two communicators in different
# orders on two ranks can wait for each other for ever.
_turn = threading.Lock()
# They watch work that a thread in the background gave to NCCL.
_background: weakref.WeakSet[Watcher] = weakref.WeakSet()


@contextmanager
def in_background(watcher: Watcher) -> Iterator[None]:
    """Within, and until the watched work is over, users' arrays go through host memory."""
    with _turn:
        _background.add(watcher)
        yield


class NcclBackend(DeviceBackend):
    """NCCL among the devices that are current at the first use. Sums are in NCCL's own order."""

    def __init__(self, context: Context) -> None:
        """Do nothing yet (not collective)."""
        self._context = context
        self._device = -1
        self._connected: tuple[NcclCommunicator, Watcher] | None = None
        self._refused = False

    @contextmanager
    def turn(self) -> Iterator[Takes | None]:
        # A process that has not imported CuPy has no arrays of it.
        if self._refused or "cupy" not in sys.modules or not _turn.acquire(blocking=False):
            yield None
            return
        try:
            is_busy = any([watcher.is_busy for watcher in _background])
            usable = self._connected is not None or nccl.unavailable_reason() is None
            yield self._takes if usable and not is_busy else None
        finally:
            _turn.release()

    def _takes(self, arrays: Sequence[Any], op: np.ufunc | None = None) -> bool:
        current = devices.current_device()
        device = self._device if self._connected else current
        return device == current and all(
            [
                devices.device_of(array) == device and (op is None or nccl.sums(array.dtype, op))
                for array in arrays
            ]
        )

    def connect(self) -> bool:
        if self._connected is None and not self._refused:
            context, since = self._context, now()
            try:
                nccl.check_devices(context)
                self._device = devices.current_device()
                made = NcclCommunicator(context.comm)
            except (CommunicationError, ValueError) as error:
                if isinstance(error, CommunicationError) and not is_raised_on_all(error, since):
                    raise
                self._refused = True
                if context.rank == 0:
                    told = f"ChainerMN: arrays on GPUs go through host memory: {error}"
                    print(told, file=sys.stderr)
            else:
                self._connected = made, Watcher(context, self._device, made, OPERATION)
                self._connected[1].nccls = [made]
        return self._connected is not None

    def allocate(self, header: bytes) -> messages.Message:
        return messages.allocate(header, devices.new_array)

    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        own = self._context.rank
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
            made.allreduce_each(sources, targets, op, stream)
            for target in targets if divisor != 1 else ():
                target /= divisor

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
            if not watcher.in_background:
                watcher.wait(partial(devices.is_done, over))

    def close(self) -> None:
        if self._connected is not None:
            made, watcher = self._connected
            with watcher.ending(), devices.use(self._device):
                watcher.finish()
                made.close()

    def release_local(self) -> None:
        if self._connected is not None:
            with devices.use(self._device):
                self._connected[1].abandon([devices.current_stream()])
