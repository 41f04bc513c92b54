"""Sums, means, maxima and minima over ranks of the arrays that users pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import raise_together
from ..gpu import devices
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

    The operation is "allreduce", "reduce_scatter" of an array for each rank, or
    "multi_node_mean" of floats. Only the last may have an array ``out``, in which there
    must be room for the result.
    """
    is_scatter = operation == "reduce_scatter"
    is_mean = operation == "multi_node_mean"
    with group.call(operation):
        with raise_together(group.handshake, operation) as call:
            if is_scatter:
                data = one_for_each(data, group.rank, group.size)
            message = messages.of_array(data, group.rank)
            own = message  # which has the form of the result
            if is_scatter:
                own = messages.of_array(data[group.rank], group.rank)
            check_operation(group.rank, operation, op, message.arrays, is_mean)
            if out is not None:
                _check_room(group.rank, operation, message.arrays, out)
            ufunc = OPERATIONS[op]
            memory = memory_of(group, message.arrays, ufunc)
            if memory != ON_GPU:  # otherwise the arrays move to host memory
                sources, targets = _prepared(group, operation, message, own)
            call.signature = _signature(group, op, message.arrays)
            call.payload = bytes([memory])
            call.nbytes = message.nbytes
        by_rank = [row[0] for row in call.payloads]
        backend, is_copied = choose_backend(group, operation, by_rank)
        if is_copied:
            return _through_host(group, operation, message, own, op)
        if is_scatter:
            backend.reduce_scatter(sources, targets[0], ufunc)
        else:
            dtypes = [target.dtype for target in targets]
            divisor = 1
            if is_mean:
                divisor = group.size
            backend.allreduce(Operand(sources, targets, dtypes, divisor, ufunc))
    return own._replace(arrays=tuple(targets)).value()


def mean_into(group: ProcessGroup, data: Any, out: Any) -> Any:
    """Write the mean over ranks of users' floats into the array ``out``, and return ``out``.

    Collective.
    """
    mean = reduce_arrays(group, "multi_node_mean", data, out=out)
    devices.assign(out, mean)
    return out


def _prepared(
    group: ProcessGroup,
    operation: str,
    message: messages.Message,
    own: messages.Message,
) -> tuple[Sequence[Any], list[Any]]:
    """Return the message's arrays as they are summed, and new arrays for the result."""
    if not message.on_gpu:
        return message.arrays, [empty(each.shape, each.dtype) for each in own.arrays]
    with devices.translated_errors(f"rank {group.rank}: {operation}"):
        sources = [devices.c_ordered(each) for each in message.arrays]
        return sources, [devices.empty_like(each) for each in own.arrays]


def _through_host(
    group: ProcessGroup,
    operation: str,
    message: messages.Message,
    own: messages.Message,
    op: str,
) -> Any:
    """Return the result for arrays on GPUs that must go through host memory (collective)."""
    with group.together(f"{operation}, copying to host memory"):
        (on_host,) = messages.on_host([message], group.rank)
    result = reduce_arrays(group, operation, on_host.value(), op)
    with group.together(f"{operation}, copying to GPUs"):
        made = messages.of_array(result, group.rank)._replace(on_gpu=own.on_gpu)
        (on_device,) = messages.on_device([made], group.rank)
        return on_device.value()


def _check_room(rank: int, operation: str, arrays: Sequence[Any], out: Any) -> None:
    """Raise unless ``out`` can hold the mean of the only array."""
    is_array = isinstance(out, np.ndarray) and out.flags.writeable
    dtypes = [array.dtype for array in arrays]
    kinds = "fcV"
    if any([dtype.kind == "c" for dtype in dtypes]):
        kinds = "c"
    if (
        not (is_array or devices.on_gpu(out))
        or any([devices.on_gpu(array) != devices.on_gpu(out) for array in arrays])
        or [array.shape for array in arrays] != [out.shape]
        or out.dtype.kind not in kinds
        or out.dtype.names
    ):
        raise ValueError(
            f"rank {rank}: recvbuf of {operation} must be a writable array of the shape of "
            f"sendbuf, in the same kind of memory, that can hold {', '.join(map(str, dtypes))}"
        )


def _signature(
    group: ProcessGroup, op: str, arrays: Sequence[Any]
) -> list[tuple[Any, ...]]:
    """Return the entries that must be equal on all ranks."""
    specs = [("array", dtype_name(array.dtype), array.shape) for array in arrays]
    chunk_bytes = ("chunk_bytes", group.settings.chunk_bytes)
    return [chunk_bytes, ("op", op), ("arrays", len(arrays)), *specs]
