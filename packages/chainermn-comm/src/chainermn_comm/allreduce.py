"""Sums and means of arrays over ranks, in new arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from . import devices, messages
from .agreement import prepare
from .arrays import can_be_summed
from .collectives import Group
from .messages import Message
from .summation import telling_of_overflow
from .transport import Transport


def sum_arrays(group: Group, transport: Transport, data: Any) -> Any:
    """The sum of all ranks' arrays, on every rank (collective).

    Args:
        group: the ranks.
        transport: among the same ranks.
        data: an array, a scalar, or a tuple or list of them; numbers of any dtype.
    """
    message, problem = prepare(lambda: _summable(group, "allreduce", data))
    return _reduce(group, transport, "allreduce", message, problem, 1)


def mean_arrays(group: Group, transport: Transport, data: Any, out: Any) -> Any:
    """The mean of all ranks' arrays, on every rank (collective).

    Args:
        group: the ranks.
        transport: among the same ranks.
        data: as for :func:`sum_arrays`, but floats.
        out: where the mean is written and which is then returned; None for a new array.
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
    mean = _reduce(group, transport, operation, message, problem, group.size)
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
) -> Any:
    arrays = message.arrays if message else ()
    view = tuple([("array", array.dtype, array.shape) for array in arrays])
    group.agreement(operation, view, problem=problem)
    assert message is not None  # else there was a problem
    sums = []
    with telling_of_overflow() if divisor > 1 else np.errstate(all="ignore"):
        for array in message.arrays:
            buffer = np.array(array, array.dtype.newbyteorder("="), order="C")
            transport.allreduce([buffer.reshape(-1)], divisor)
            sums.append(buffer.astype(array.dtype, copy=False))
    return replace(message, arrays=tuple(sums)).value()
