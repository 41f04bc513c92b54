"""Sums, means, maxima and minima over ranks of the arrays that users pass, in new arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from .. import devices, staging
from ..arrays import OPERATIONS, check_operation
from ..messaging import Context, SharedFailure, collectives, messages
from .algorithm import Operand
from .factories import AlgorithmCache

_EMPTY = np.empty(0, np.uint8)


def reduce_arrays(
    context: Context,
    algorithms: AlgorithmCache,
    data: Any,
    op: str = "sum",
    mean: bool = False,
    out: Any = None,
) -> Any:
    """Return the sum, maximum, minimum or mean of all ranks' arrays, on every rank (collective).

    Means are of floats; they are written into ``out``, which is then returned, unless it is None.
    """
    operation, divisor = ("multi_node_mean", context.size) if mean else ("allreduce", 1)
    with context.in_step(operation):
        with SharedFailure(context.handshake, operation):
            message = messages.of_array(data, context.rank)
            check_operation(context.rank, operation, op, message.arrays, mean)
            if out is not None:
                _check_room(context.rank, operation, message.arrays, out)
            results, sources = _rooms_for(message), list(map(_native, message.arrays))
            dtypes = [result.dtype for result in results]
        on_gpu = bool(message.on_gpu) or devices.on_gpu(out)
        uses_gpu = _agree(context, operation, op, [message], on_gpu)
        algorithms.allreduce(Operand(sources, results, dtypes, divisor, OPERATIONS[op]))
    return _hand_out(context, operation, message, results, out, uses_gpu)


def reduce_scatter_arrays(
    context: Context, algorithms: AlgorithmCache, values: Sequence[Any], op: str
) -> Any:
    """Return the sum, maximum or minimum over ranks of the values for this rank (collective)."""
    operation = "reduce_scatter"
    with context.in_step(operation):
        with SharedFailure(context.handshake, operation):
            make = partial(messages.of_arrays, rank=context.rank)
            outgoing = list(collectives.one_for_each(context, values, make).values())
            every = [array for each in outgoing for array in each.arrays]
            check_operation(context.rank, operation, op, every)
            own = outgoing[context.rank]
            results = _rooms_for(own)
            rows = [[_native(array).reshape(-1) for array in each.arrays] for each in outgoing]
        on_gpu = any(message.on_gpu for message in outgoing)
        uses_gpu = _agree(context, operation, op, outgoing, on_gpu)
        # A value may be several arrays; the i-th of all ranks travel together.
        for sources, result in zip_longest(zip_longest(*rows, fillvalue=_EMPTY), results):
            target = _EMPTY if result is None else result.reshape(-1)
            algorithms.reduce_scatter(sources, target, OPERATIONS[op])
    return _hand_out(context, operation, own, results, None, uses_gpu)


def _check_room(rank: int, operation: str, arrays: Sequence[np.ndarray], out: Any) -> None:
    """Raise unless ``out`` can hold the sum of the only array."""
    shapes = [array.shape for array in arrays]
    usable = devices.on_gpu(out) or (isinstance(out, np.ndarray) and out.flags.writeable)
    kinds = "c" if any(array.dtype.kind == "c" for array in arrays) else "fcV"
    if not usable or shapes != [out.shape] or out.dtype.kind not in kinds:
        dtypes = ", ".join(str(array.dtype) for array in arrays)
        raise ValueError(
            f"rank {rank}: recvbuf of {operation} must be a writable array of the shape of "
            f"sendbuf, {', '.join(map(str, shapes))}, that can hold {dtypes}"
        )


def _agree(
    context: Context, operation: str, op: str, own: Sequence[messages.Message], on_gpu: bool
) -> bool:
    """Check that all ranks' arrays are alike (collective); return whether any is on a GPU."""
    specs = [("array", array.dtype, array.shape) for each in own for array in each.arrays]
    counts = [len(each.arrays) for each in own]
    signature = (("chunk_bytes", context.chunk_bytes), ("op", op), ("arrays", *counts), *specs)
    nbytes = sum(message.nbytes for message in own)
    return any(map(any, context.handshake(operation, signature, bytes([on_gpu]), nbytes)))


def _hand_out(
    context: Context,
    operation: str,
    message: messages.Message,
    results: Sequence[np.ndarray],
    out: Any,
    uses_gpu: bool,
) -> Any:
    """Return results as the message's arrays were; all ranks have them where GPUs are used."""

    def hand_out() -> Any:
        pairs = zip(results, message.arrays, strict=True)
        arrays = [result.astype(array.dtype, copy=False) for result, array in pairs]
        if out is None:
            result = message._replace(arrays=tuple(arrays))
            return messages.on_device([result], context.rank)[0].value()
        if devices.on_gpu(out):
            staging.assign(out, arrays[0], context.rank)
        else:
            out[...] = arrays[0]
        return out

    if uses_gpu:
        return context.run_on_all_ranks(operation, hand_out, "copying to GPUs")
    return hand_out()


def _rooms_for(message: messages.Message) -> list[np.ndarray]:
    """Return new arrays in this machine's byte order, in which sums are taken."""
    return [np.empty(each.shape, each.dtype.newbyteorder("=")) for each in message.arrays]


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)
