"""Sums and means of arrays over ranks, in new arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import devices
from ..arrays import can_be_summed
from ..config import Settings
from ..messaging import messages
from ..messaging.collectives import Group
from ..messaging.handshake import prepare
from ..messaging.messages import Message
from .summation import telling_of_overflow
from .transport import Transport


def sum_arrays(group: Group, transport: Transport, data: Any, settings: Settings) -> Any:
    """The sum of all ranks' arrays, on every rank (collective).

    Args:
        group: the ranks.
        transport: among the same ranks.
        data: an array, a scalar, or a tuple or list of them; numbers of any dtype.
        settings: the communicator's.
    """
    message, problem = prepare(lambda: _summable(group, "allreduce", data))
    return _reduce(group, transport, "allreduce", message, problem, 1, settings)


def mean_arrays(group: Group, transport: Transport, data: Any, out: Any, settings: Settings) -> Any:
    """The mean of all ranks' arrays, on every rank (collective).

    Args:
        group: the ranks.
        transport: among the same ranks.
        data: as for :func:`sum_arrays`, but floats.
        out: where the mean is written and which is then returned; None for a new array.
        settings: the communicator's.
    """
    operation = "multi_node_mean"

    def mine() -> Message:
        message = _summable(group, operation, data)
        for array in message.arrays:
            if array.dtype.kind in "biu":
                raise TypeError(f"rank {group.rank}: {operation} takes floats, got {array.dtype}")
        if out is not None:
            shapes = [array.shape for array in message.arrays]
            usable = devices.on_gpu(out) or (isinstance(out, np.ndarray) and out.flags.writeable)
            if not usable or shapes != [out.shape]:
                raise ValueError(
                    f"rank {group.rank}: recvbuf of {operation} must be a writable array of the "
                    f"shape of sendbuf, {', '.join(map(str, shapes))}"
                )
        return message

    message, problem = prepare(mine)
    mean = _reduce(group, transport, operation, message, problem, group.size, settings)
    if out is None:
        return mean
    if devices.on_gpu(out) != devices.on_gpu(mean):
        mean = devices.to_device(mean) if devices.on_gpu(out) else devices.to_host(mean)
    out[...] = mean
    return out


def _summable(group: Group, operation: str, data: Any) -> Message:
    message = messages.of_array(data, group.rank)
    for array in message.arrays:
        if not can_be_summed(array.dtype):
            raise TypeError(f"rank {group.rank}: {operation} can't sum dtype {array.dtype}")
    return message


def _reduce(
    group: Group,
    transport: Transport,
    operation: str,
    message: Message | None,
    problem: BaseException | None,
    divisor: int,
    settings: Settings,
) -> Any:
    arrays = message.arrays if message else ()
    buffers: list[np.ndarray] = []
    if problem is None:
        made, problem = prepare(lambda: [_copied(array) for array in arrays])
        buffers = made or []
    forms = [("array", array.dtype, array.shape) for array in arrays]
    view = (("chunk_bytes", settings.chunk_bytes), *forms)
    nbytes = sum(array.nbytes for array in arrays)
    group.agreement(operation, view, problem=problem, nbytes=nbytes)
    assert message is not None  # else there was a problem
    with telling_of_overflow() if divisor > 1 else np.errstate(all="ignore"):
        for buffer in buffers:
            transport.allreduce([buffer.reshape(-1)], divisor)
    sums = [
        buffer.astype(array.dtype, copy=False)
        for buffer, array in zip(buffers, arrays, strict=True)
    ]
    return message._replace(arrays=tuple(sums)).value()


def _copied(array: np.ndarray) -> np.ndarray:
    """A contiguous copy in this machine's byte order, for the sum to be taken in."""
    return np.array(array, array.dtype.newbyteorder("="), order="C")
