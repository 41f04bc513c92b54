"""Sums, means, maxima and minima over ranks of the arrays that users pass, in new arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from .. import devices, staging
from ..arrays import OPERATIONS, check_operation
from ..messaging import ProcessGroup, SharedFailure, Takes, collectives, messages
from .algorithm import Operand
from .factories import AlgorithmCache

_EMPTY = np.empty(0, np.uint8)


def reduce_arrays(
    group: ProcessGroup,
    algorithms: AlgorithmCache,
    data: Any,
    op: str = "sum",
    mean: bool = False,
    out: Any = None,
) -> Any:
    """Return the sum, maximum, minimum or mean of all ranks' arrays, on every rank (collective).

    Means are of floats; they are written into ``out``, which is then returned, unless it is None.
    """
    operation, divisor = ("multi_node_mean", group.size) if mean else ("allreduce", 1)
    with group.in_step(operation):
        with SharedFailure(group.handshake, operation):
            takes = _for_sums(group, op, out)
            made = messages.of_arrays([data], group.rank, takes)
            check_operation(group.rank, operation, op, made[0].arrays, mean)
            if out is not None:
                _check_room(group.rank, operation, made[0].arrays, out)
            (sources,), results = _prepared(group, operation, made, made[0], out)
        places = _agree(group, operation, op, made, takes, out is not None and devices.on_gpu(out))
        backend, found = collectives.agreed(group, operation, places, made)
        if group.device is not None and backend is group.device:
            group.device.allreduce(sources, results, OPERATIONS[op], divisor)
            return _given_on_gpu(made[0], results, out)
        if found is not made:
            (sources,), results = _prepared(group, operation, found, found[0])
        dtypes = [result.dtype for result in results]
        algorithms.allreduce(Operand(sources, results, dtypes, divisor, OPERATIONS[op]))
    return _hand_out(group, operation, found[0], results, out, places)


def reduce_scatter_arrays(
    group: ProcessGroup, algorithms: AlgorithmCache, values: Sequence[Any], op: str
) -> Any:
    """Return the sum, maximum or minimum over ranks of the values for this rank (collective)."""
    operation = "reduce_scatter"
    with group.in_step(operation):
        with SharedFailure(group.handshake, operation):
            takes = _for_sums(group, op)
            sent = collectives.one_for_each(group, values)
            made = messages.of_arrays(list(sent.values()), group.rank, takes)
            check_operation(group.rank, operation, op, [a for each in made for a in each.arrays])
            rows, results = _prepared(group, operation, made, made[group.rank])
        places = _agree(group, operation, op, made, takes)
        backend, found = collectives.agreed(group, operation, places, made)
        if group.device is not None and backend is group.device:
            group.device.reduce_scatter(rows, results, OPERATIONS[op])
            return _given_on_gpu(made[group.rank], results)
        if found is not made:
            rows, results = _prepared(group, operation, found, found[group.rank])
        rows = [[array.reshape(-1) for array in row] for row in rows]
        # A value may be several arrays; the i-th of all ranks travel together.
        for sources, result in zip_longest(zip_longest(*rows, fillvalue=_EMPTY), results):
            target = _EMPTY if result is None else result.reshape(-1)
            algorithms.reduce_scatter(sources, target, OPERATIONS[op])
    return _hand_out(group, operation, found[group.rank], results, None, places)


def _for_sums(group: ProcessGroup, op: str, out: Any = None) -> Takes | None:
    """Return what says of arrays whether they can stay for their ``op``, with ``out``."""
    device, outs = group.device, [] if out is None else [out]
    if device is None or op not in list(OPERATIONS) or not all(map(devices.on_gpu, outs)):
        return None
    return lambda arrays: device.takes([*arrays, *outs], OPERATIONS[op])


def _prepared(
    group: ProcessGroup,
    operation: str,
    made: Sequence[messages.Message],
    like: messages.Message,
    out: Any = None,
) -> tuple[list[list[Any]], list[Any]]:
    """Return each message's arrays as they are summed, and new arrays like those of one for sums.

    On the host they have this machine's byte order. On a GPU they are in C order, and the result is
    ``out`` where that is the source, too.
    """
    if not any([each.stays for each in made]):
        rows = [list(map(_native, each.arrays)) for each in made]
        return rows, [np.empty(each.shape, each.dtype.newbyteorder("=")) for each in like.arrays]
    with devices.translated_errors(f"rank {group.rank}: {operation}"):
        rows = [list(map(devices.c_ordered, each.arrays)) for each in made]
        if out is not None and out is rows[0][0]:
            return rows, [out]
        return rows, list(map(devices.empty_like, like.arrays))


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
    group: ProcessGroup,
    operation: str,
    op: str,
    own: Sequence[messages.Message],
    takes: Takes | None,
    goes_to_gpu: bool = False,
) -> list[int]:
    """Check that all ranks' arrays are alike (collective); return where each rank's lie."""
    specs = [("array", array.dtype, array.shape) for each in own for array in each.arrays]
    counts = [len(each.arrays) for each in own]
    signature = (("chunk_bytes", group.chunk_bytes), ("op", op), ("arrays", *counts), *specs)
    nbytes = sum(message.nbytes for message in own)
    place = collectives.places_of(own, takes) | (collectives.COPIED if goes_to_gpu else 0)
    rows = group.handshake(operation, signature, bytes([place]), nbytes)
    return [row[0] for row in rows]


def _hand_out(
    group: ProcessGroup,
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
            return messages.on_device([result], group.rank)[0].value()
        if devices.on_gpu(out):
            staging.assign(out, arrays[0], group.rank)
        else:
            out[...] = arrays[0]
        return out

    if any([place & (collectives.COPIED | collectives.STAYS) for place in places]):
        return group.run_on_all_ranks(operation, hand_out, "copying to GPUs")
    return hand_out()


def _given_on_gpu(message: messages.Message, results: Sequence[Any], out: Any = None) -> Any:
    """Return results as the message's arrays were; in ``out`` if that is given."""
    if out is None:
        return message._replace(arrays=tuple(results)).value()
    if results[0] is not out:
        devices.assign(out, results[0])
    return out


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)
