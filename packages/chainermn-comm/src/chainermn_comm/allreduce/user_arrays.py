"""Sums and means over ranks of the arrays that users pass, in new arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import devices
from ..arrays import can_be_summed
from ..messaging import Context, Message, SharedFailure, message_of_array
from .pairwise import Allreduce
from .summation import overflow_errstate


def sum_arrays(context: Context, allreduce: Allreduce, data: Any) -> Any:
    """Return the sum of all ranks' arrays, numbers of any dtype, on every rank (collective)."""
    operation = "allreduce"
    with SharedFailure(context.handshake, operation):
        message = _summable(context, operation, data)
        buffers = [_copied(array) for array in message.arrays]
    return _reduce(context, allreduce, operation, message, buffers, 1)


def mean_arrays(context: Context, allreduce: Allreduce, data: Any, out: Any) -> Any:
    """Return the mean of all ranks' float arrays, on every rank (collective).

    It is written into ``out``, which is then returned, unless that is None.
    """
    operation = "multi_node_mean"
    with SharedFailure(context.handshake, operation):
        message = _summable(context, operation, data)
        for array in message.arrays:
            if array.dtype.kind in "biu":
                raise TypeError(f"rank {context.rank}: {operation} takes floats, got {array.dtype}")
        if out is not None:
            shapes = [array.shape for array in message.arrays]
            usable = devices.on_gpu(out) or (isinstance(out, np.ndarray) and out.flags.writeable)
            if not usable or shapes != [out.shape]:
                raise ValueError(
                    f"rank {context.rank}: recvbuf of {operation} must be a writable array of the "
                    f"shape of sendbuf, {', '.join(map(str, shapes))}"
                )
        buffers = [_copied(array) for array in message.arrays]
    mean = _reduce(context, allreduce, operation, message, buffers, context.size)
    if out is None:
        return mean
    if devices.on_gpu(out) != devices.on_gpu(mean):
        mean = devices.to_device(mean) if devices.on_gpu(out) else devices.to_host(mean)
    out[...] = mean
    return out


def _summable(context: Context, operation: str, data: Any) -> Message:
    message = message_of_array(data, context.rank)
    for array in message.arrays:
        if not can_be_summed(array.dtype):
            raise TypeError(f"rank {context.rank}: {operation} can't sum dtype {array.dtype}")
    return message


def _reduce(
    context: Context,
    allreduce: Allreduce,
    operation: str,
    message: Message,
    buffers: list[np.ndarray],
    divisor: int,
) -> Any:
    """Return the sum of the message's arrays, of which ``buffers`` are copies, divided."""
    specs = [("array", array.dtype, array.shape) for array in message.arrays]
    signature = (("chunk_bytes", context.chunk_bytes), *specs)
    context.handshake(operation, signature, nbytes=message.nbytes)
    with overflow_errstate() if divisor > 1 else np.errstate(all="ignore"):
        for buffer in buffers:
            allreduce([buffer.reshape(-1)], divisor)
    sums = [
        buffer.astype(array.dtype, copy=False)
        for buffer, array in zip(buffers, message.arrays, strict=True)
    ]
    return message._replace(arrays=tuple(sums)).value()


def _copied(array: np.ndarray) -> np.ndarray:
    """Return a contiguous copy in this machine's byte order, in which the sum is taken."""
    return np.array(array, array.dtype.newbyteorder("="), order="C")
