"""Sums, means, maxima and minima over ranks of the arrays that users pass, in new arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from .. import devices, staging
from ..arrays import OPERATIONS, check_operation
from ..messaging import Context, SharedFailure, Takes, collectives, messages
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
    with context.in_step(operation), context.device_turn() as takes:
        with SharedFailure(context.handshake, operation):
            check_operation(context.rank, operation, op, ())
            takes = _for_sums(takes, op, out)
            made = messages.of_arrays([data], context.rank, takes)
            check_operation(context.rank, operation, op, made[0].arrays, mean)
            if out is not None:
                _check_room(context.rank, operation, made[0].arrays, out)
            sources, results = _sources(made)[0], _rooms_for(made[0], out)
        places = _agree(context, operation, op, made, takes, devices.on_gpu(out))
        backend, found = collectives.agreed(context, operation, places, made)
        if context.device is not None and backend is context.device:
            context.device.allreduce(sources, results, OPERATIONS[op], divisor)
            return _given_on_gpu(made[0], results, out)
        if found is not made:
            sources, results = _sources(found)[0], _rooms_for(found[0])
        dtypes = [result.dtype for result in results]
        algorithms.allreduce(Operand(sources, results, dtypes, divisor, OPERATIONS[op]))
    return _hand_out(context, operation, found[0], results, out, places)


def reduce_scatter_arrays(
    context: Context, algorithms: AlgorithmCache, values: Sequence[Any], op: str
) -> Any:
    """Return the sum, maximum or minimum over ranks of the values for this rank (collective)."""
    operation = "reduce_scatter"
    with context.in_step(operation), context.device_turn() as takes:
        with SharedFailure(context.handshake, operation):
            check_operation(context.rank, operation, op, ())
            takes = _for_sums(takes, op)
            sent = collectives.one_for_each(context, values, messages.of_arrays, takes)
            made = list(sent.values())
            check_operation(context.rank, operation, op, [a for each in made for a in each.arrays])
            rows, results = _sources(made), _rooms_for(made[context.rank])
        places = _agree(context, operation, op, made, takes)
        backend, found = collectives.agreed(context, operation, places, made)
        if context.device is not None and backend is context.device:
            context.device.reduce_scatter(rows, results, OPERATIONS[op])
            return _given_on_gpu(made[context.rank], results)
        if found is not made:
            rows, results = _sources(found), _rooms_for(found[context.rank])
        rows = [[array.reshape(-1) for array in row] for row in rows]
        # A value may be several arrays; the i-th of all ranks travel together.
        for sources, result in zip_longest(zip_longest(*rows, fillvalue=_EMPTY), results):
            target = _EMPTY if result is None else result.reshape(-1)
            algorithms.reduce_scatter(sources, target, OPERATIONS[op])
    return _hand_out(context, operation, found[context.rank], results, None, places)


def _for_sums(takes: Takes | None, op: str, out: Any = None) -> Takes | None:
    """Return what says of arrays whether a backend also takes their ``op``, and ``out``."""
    if takes is None or not (out is None or devices.on_gpu(out)):
        return None
    outs = [] if out is None else [out]
    return lambda arrays: takes([*arrays, *outs], OPERATIONS[op])


def _sources(made: Sequence[messages.Message]) -> list[list[Any]]:
    """Return each message's arrays as they are summed: in C order where they are on GPUs."""
    return [
        [devices.c_ordered(a) if each.stays else _native(a) for a in each.arrays] for each in made
    ]


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
    context: Context,
    operation: str,
    op: str,
    own: Sequence[messages.Message],
    takes: Takes | None,
    goes_to_gpu: bool = False,
) -> list[int]:
    """Check that all ranks' arrays are alike (collective); return where each rank's lie."""
    specs = [("array", array.dtype, array.shape) for each in own for array in each.arrays]
    counts = [len(each.arrays) for each in own]
    signature = (("chunk_bytes", context.chunk_bytes), ("op", op), ("arrays", *counts), *specs)
    nbytes = sum(message.nbytes for message in own)
    place = collectives.places_of(own, takes) | (collectives.COPIED if goes_to_gpu else 0)
    rows = context.handshake(operation, signature, bytes([place]), nbytes)
    return [row[0] for row in rows]


def _hand_out(
    context: Context,
    operation: str,
    message: messages.Message,
    results: Sequence[np.ndarray],
    out: Any,
    places: Sequence[int],
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

    if any([place & (collectives.COPIED | collectives.STAYS) for place in places]):
        return context.run_on_all_ranks(operation, hand_out, "copying to GPUs")
    return hand_out()


def _given_on_gpu(message: messages.Message, results: Sequence[Any], out: Any = None) -> Any:
    """Return results as the message's arrays were; in ``out`` if that is given."""
    if out is None:
        return message._replace(arrays=tuple(results)).value()
    if results[0] is not out:
        devices.assign(out, results[0])
    return out


def _rooms_for(message: messages.Message, out: Any = None) -> list[Any]:
    """Return new arrays in C order and this machine's byte order, in which sums are taken.

    On a GPU it is ``out``, where that serves.
    """
    if not message.stays:
        return [np.empty(each.shape, each.dtype.newbyteorder("=")) for each in message.arrays]
    if out is not None and out.flags.c_contiguous and out.dtype == message.arrays[0].dtype:
        return [out]
    return list(map(devices.empty_like, message.arrays))


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)
