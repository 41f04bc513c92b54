"""Sums and means over ranks of the arrays that users pass, in new arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import devices, staging
from ..arrays import can_be_summed
from ..messaging import Context, SharedFailure, messages
from .pairwise import Allreduce
from .summation import overflow_errstate


def reduce_arrays(
    context: Context, allreduce: Allreduce, data: Any, mean: bool = False, out: Any = None
) -> Any:
    """Return the sum or the mean of all ranks' arrays, on every rank (collective).

    Sums are of numbers of any dtype, means of floats; they are written into ``out``, which is then
    returned, unless it is None. Where some rank has an array on a GPU, ranks check at the end that
    all of them have their results.
    """
    operation, divisor = ("multi_node_mean", context.size) if mean else ("allreduce", 1)
    with context.in_step(operation):
        with SharedFailure(context.handshake, operation):
            message = _checked(context.rank, operation, data, mean, out)
            buffers = [_copied(array) for array in message.arrays]
        specs = [("array", array.dtype, array.shape) for array in message.arrays]
        signature = (("chunk_bytes", context.chunk_bytes), *specs)
        uses_gpu = bytes([bool(message.on_gpu) or devices.on_gpu(out)])
        payloads = context.handshake(operation, signature, uses_gpu, message.nbytes)
        _allreduce_each(allreduce, buffers, divisor)

        def hand_out() -> Any:
            pairs = zip(buffers, message.arrays, strict=True)
            results = [buffer.astype(array.dtype, copy=False) for buffer, array in pairs]
            if out is None:
                result = message._replace(arrays=tuple(results))
                return messages.on_device([result], context.rank)[0].value()
            if devices.on_gpu(out):
                staging.assign(out, results[0], context.rank)
            else:
                out[...] = results[0]
            return out

        if any(map(any, payloads)):
            return context.run_on_all_ranks(operation, hand_out, "copying to GPUs")
    return hand_out()


def _checked(rank: int, operation: str, data: Any, mean: bool, out: Any) -> messages.Message:
    """Return the message of arrays that can be summed, and whose sum ``out`` can hold."""
    message = messages.of_array(data, rank)
    for array in message.arrays:
        if not can_be_summed(array.dtype):
            raise TypeError(f"rank {rank}: {operation} can't sum dtype {array.dtype}")
        if mean and array.dtype.kind in "biu":
            raise TypeError(f"rank {rank}: {operation} takes floats, got {array.dtype}")
    if out is not None:
        shapes = [array.shape for array in message.arrays]
        usable = devices.on_gpu(out) or (isinstance(out, np.ndarray) and out.flags.writeable)
        kinds = "c" if any(array.dtype.kind == "c" for array in message.arrays) else "fcV"
        if not usable or shapes != [out.shape] or out.dtype.kind not in kinds:
            dtypes = ", ".join(str(array.dtype) for array in message.arrays)
            raise ValueError(
                f"rank {rank}: recvbuf of {operation} must be a writable array of the shape of "
                f"sendbuf, {', '.join(map(str, shapes))}, that can hold {dtypes}"
            )
    return message


def _allreduce_each(allreduce: Allreduce, buffers: list[np.ndarray], divisor: int) -> None:
    with overflow_errstate() if divisor > 1 else np.errstate(all="ignore"):
        for buffer in buffers:
            allreduce([buffer.reshape(-1)], divisor)


def _copied(array: np.ndarray) -> np.ndarray:
    """Return a contiguous copy in this machine's byte order, in which the sum is taken."""
    return np.array(array, array.dtype.newbyteorder("="), order="C")
