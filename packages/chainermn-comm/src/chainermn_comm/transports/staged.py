"""Moves GPU buffers through pinned host memory and MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import devices
from ..transport import Transport


class StagedTransport:
    """A transport for GPU buffers made of one for host buffers.

    An allreduce is two calls, so that the device can go on with other work while a buffer is
    on its way to the host. Buffers lie in slots, of which each holds one at a time.
    """

    def __init__(self, transport: Transport, slots: int) -> None:
        """Own ``transport``; no memory is taken before :meth:`reserve`."""
        self._transport = transport
        self._arrived = [devices.new_event() for _ in range(slots)]
        self._host = [np.empty(0, np.uint8)] * slots

    def reserve(self, nbytes: int) -> None:
        """Have room for buffers of so many bytes; nothing may be under way."""
        if self._host[0].nbytes < nbytes:
            self._host = [devices.pinned(nbytes) for _ in self._host]

    def begin(self, slot: int, buffer: Any, stream: Any) -> None:
        """Copy ``buffer`` to the host in the stream's order; returns at once."""
        devices.copy_to_host(buffer, self._host[slot][: buffer.nbytes], stream)
        self._arrived[slot].record(stream)

    def finish(
        self,
        slot: int,
        buffer: Any,
        dtype: np.dtype,
        stream: Any,
        divisor: int,
        wait: Callable[[Any], None],
    ) -> None:
        """Sum over ranks what :meth:`begin` copied, and copy it back in the stream's order.

        Args:
            slot: as given to :meth:`begin`.
            buffer: 1-D; gets the sum over ranks divided by ``divisor``.
            dtype: of the numbers in it, whatever the array says.
            stream: whose work comes before and after.
            divisor: the sum is divided by it before it is rounded.
            wait: returns when an event has happened.
        """
        wait(self._arrived[slot])
        host = self._host[slot][: buffer.nbytes].view(dtype)
        with np.errstate(over="raise" if divisor > 1 else "ignore", invalid="ignore"):
            self._transport.allreduce([host], divisor)
        devices.copy_to_device(host, buffer, stream)

    def close(self) -> None:
        """Release the memory and the transport."""
        self._host = [np.empty(0, np.uint8)] * len(self._host)
        self._transport.close()
