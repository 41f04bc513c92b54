"""Sums, means, maxima and minima over ranks of the arrays that users pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import raise_together
from ..gpu import devices, staging
from ..layout import Operand
from ..messaging import (
    ON_GPU,
    ProcessGroup,
    choose_backend,
    dtype_name,
    memory_of,
    messages,
)
from ..numbers import OPERATIONS, check_operation, empty, one_for_each


def reduce_arrays(
    group: ProcessGroup, operation: str, data: Any, op: str = "sum", out: Any = None
) -> Any:
    """Return the sum, maximum, minimum or mean over ranks of users' arrays (collective).

    The operation is "allreduce", "reduce_scatter" of a value for each rank, or
    "multi_node_mean" of floats; only the last may have an array for the result,
    ``out``, which is then returned.
    """
    is_scatter = operation == "reduce_scatter"
    own = 0  # the number of the value for this rank
    if is_scatter:
        own = group.rank
    is_mean = operation == "multi_node_mean"
    divisor = 1
    if is_mean:
        divisor = group.size
    with group.call(operation):
        with raise_together(group.handshake, operation) as call:
            values = [data]
            if is_scatter:
                values = one_for_each(data, group.rank, group.size)
            made = messages.of_arrays(values, group.rank)
            arrays = [array for message in made for array in message.arrays]
            check_operation(group.rank, operation, op, arrays, is_mean)
            places = arrays
            if out is not None:
                _check_room(group.rank, operation, arrays, out)
                places = [*arrays, out]
            memory = memory_of(group, places, OPERATIONS[op])
            if memory != ON_GPU:  # else the arrays move to host memory
                rows, results = _prepared(group, operation, made, own, out)
            call.signature = _signature(group, op, made)
            call.payload = bytes([memory])
            call.nbytes = sum(message.nbytes for message in made)
        by_rank = [row[0] for row in call.payloads]
        backend, is_copied = choose_backend(group, operation, by_rank)
        if is_copied:
            with group.together(f"{operation}, copying to host memory"):
                made = messages.on_host(made, group.rank)
                rows, results = _prepared(group, operation, made, own)
        if is_scatter:
            backend.reduce_scatter(rows, results, OPERATIONS[op])
        else:
            dtypes = [result.dtype for result in results]
            operand = Operand(rows[0], results, dtypes, divisor, OPERATIONS[op])
            backend.allreduce(operand)
        if backend is not group.host and out is not None and results[0] is not out:
            devices.assign(out, results[0])
    if backend is group.host:
        return _hand_out(group, operation, made[own], results, out, is_copied)
    if out is not None:
        return out
    return made[own]._replace(arrays=tuple(results)).value()


def _prepared(
    group: ProcessGroup,
    operation: str,
    made: list[messages.Message],
    own: int,
    out: Any = None,
) -> tuple[list[list[Any]], list[Any]]:
    """Return each message's arrays as they are summed, and arrays for sums like one's ``own``.

    On the host they have this machine's byte order. On a GPU they are in C order, and
    the result is ``out`` where that is the source, too.
    """
    if not any([devices.on_gpu(array) for each in made for array in each.arrays]):
        rows = [
            [
                array.astype(array.dtype.newbyteorder("="), copy=False)
                for array in each.arrays
            ]
            for each in made
        ]
        return rows, [empty(array.shape, array.dtype) for array in rows[own]]
    with devices.translated_errors(f"rank {group.rank}: {operation}"):
        rows = [list(map(devices.c_ordered, each.arrays)) for each in made]
        if out is not None and out is rows[0][0]:
            return rows, [out]
        return rows, list(map(devices.empty_like, made[own].arrays))


def _check_room(
    rank: int, operation: str, arrays: Sequence[np.ndarray], out: Any
) -> None:
    """Raise unless ``out`` can hold the sum of the only array."""
    shapes = [array.shape for array in arrays]
    is_array = isinstance(out, np.ndarray) and out.flags.writeable
    kinds = "fcV"
    if any(array.dtype.kind == "c" for array in arrays):
        kinds = "c"
    if (
        not (is_array or devices.on_gpu(out))
        or shapes != [out.shape]
        or out.dtype.kind not in kinds
        or out.dtype.names
    ):
        dtypes = ", ".join(str(array.dtype) for array in arrays)
        raise ValueError(
            f"rank {rank}: recvbuf of {operation} must be a writable array of the shape of "
            f"sendbuf, {', '.join(map(str, shapes))}, that can hold {dtypes}"
        )


def _signature(
    group: ProcessGroup, op: str, own: Sequence[messages.Message]
) -> tuple[tuple[Any, ...], ...]:
    """Return what must be equal on all ranks."""
    specs = [
        ("array", dtype_name(array.dtype), array.shape)
        for each in own
        for array in each.arrays
    ]
    counts = [len(each.arrays) for each in own]
    chunk_bytes = group.settings.chunk_bytes
    return (("chunk_bytes", chunk_bytes), ("op", op), ("arrays", *counts), *specs)


def _hand_out(
    group: ProcessGroup,
    operation: str,
    message: messages.Message,
    results: Sequence[np.ndarray],
    out: Any,
    is_copied: bool,
) -> Any:
    """Return results as the message's arrays were; all ranks have them where GPUs are used."""

    def hand_out() -> Any:
        pairs = zip(results, message.arrays, strict=True)
        arrays = [result.astype(array.dtype, copy=False) for result, array in pairs]
        if out is None:
            result = message._replace(arrays=tuple(arrays))
            return messages.on_device([result], group.rank)[0].value()
        if devices.on_gpu(out):
            with devices.using_device_of(out):
                devices.assign(out, staging.to_device(arrays, group.rank)[0])
        else:
            out[...] = arrays[0]
        return out

    if is_copied:
        with group.together(f"{operation}, copying to GPUs"):
            return hand_out()
    return hand_out()
