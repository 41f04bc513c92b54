"""Broadcasts a model's parameters, also to ranks that haven't initialised them yet."""

from __future__ import annotations

import contextlib
import pickle
from itertools import pairwise
from typing import Any

import numpy as np

from .. import devices, staging
from ..errors import RankMismatchError, raise_together
from ..messaging import ProcessGroup, collectives
from . import parameters

OPERATION = "bcast_data"


def bcast_parameters(group: ProcessGroup, model: Any) -> None:
    """Give every rank the parameters of rank 0 (collective).

    A parameter that rank 0 hasn't initialised comes from the lowest rank that has; one
    that no rank has is left alone.
    """
    with raise_together(group.handshake, OPERATION) as agreement:
        named = parameters.named(model, group.rank)
        arrays = [
            parameters.checked(param.data, name, group.rank) for name, param in named
        ]
        own_specs = [
            None if array is None else (array.shape, array.dtype) for array in arrays
        ]
        agreement.signature = tuple([("parameter", name) for name, _ in named])
        agreement.payload = pickle.dumps(own_specs)
        agreement.nbytes = sum(array.nbytes for array in arrays if array is not None)
    rows = [pickle.loads(payload) for payload in agreement.payloads]
    # Each parameter that is sent, with the rank that sends it, and its shape and dtype
    # there.
    sent: list[tuple[Any, int, tuple[int, ...], np.dtype]] = []
    for (name, param), specs in zip(named, zip(*rows, strict=True), strict=True):
        having = [(rank, *spec) for rank, spec in enumerate(specs) if spec is not None]
        if len(set(specs) - {None}) > 1:
            listed = "; ".join(
                f"{dtype} {shape} on rank {rank}" for rank, shape, dtype in having
            )
            text = f"ranks disagree on parameter {name}: {listed}"
            raise group.handshake.raised_on_all(
                RankMismatchError(f"bcast_data on rank {group.rank}: {text}")
            )
        sent += [(param, *first) for first in having[:1]]

    initialising = f"{OPERATION}, initialising parameters"
    with raise_together(group.handshake, initialising) as initialised:
        for param, _, shape, dtype in sent:
            if param.data is None:
                if hasattr(param, "initialize"):
                    param.initialize(shape)
                if (
                    param.data is None
                    or param.data.shape != shape
                    or param.data.dtype != dtype
                ):
                    param.data = np.empty(shape, dtype)
        arrays, takes = [param.data for param, *_ in sent], group.device.takes
        place = collectives.COPIED * any(map(devices.on_gpu, arrays))
        if place and all(map(devices.on_gpu, arrays)) and takes(arrays):
            place = collectives.STAYS | collectives.CAN_STAY
            with devices.translated_errors(f"rank {group.rank}: {OPERATION}"):
                flats = list(map(devices.c_ordered, arrays))
        initialised.payload = bytes([place])
    places = [row[0] for row in initialised.payloads]
    if not any(places):
        _bcast(group, [each[:2] for each in sent])
        return
    backend, _ = collectives.agreed(group, OPERATION, places, [])
    if backend is not group.host:
        backend.broadcast(
            [(root, flat) for flat, (_, root, *_) in zip(flats, sent, strict=True)]
        )
        for array, flat in zip(arrays, flats, strict=True):
            if flat is not array:
                devices.assign(array, flat)
        return
    for root in sorted({root for _, root, *_ in sent}):
        _bcast_packed(group, [param for param, its, *_ in sent if its == root], root)


def _bcast_packed(group: ProcessGroup, params: list[Any], root: int) -> None:
    """Overwrite parameters on all ranks by root's, many in each transfer (collective).

    Before each transfer ranks check that none has failed, and once more at the end.
    """
    is_root = group.rank == root
    # The same on all ranks, whose shapes and dtypes are equal.
    batches = staging.cut([param.data.nbytes for param in params])
    flats: list[Any] = []
    buffer: Any = None
    with contextlib.ExitStack() as stack:

        def take_turn(arrived: Any, leaving: Any) -> None:
            nonlocal buffer
            with devices.translated_errors(f"rank {group.rank}: copying parameters"):
                if buffer is None:
                    flats.extend([_flat(param.data, is_root) for param in params])
                    buffer = stack.enter_context(staging.buffers(flats, count=1))[0]
                if is_root and leaving:
                    staging.wait(
                        staging.start(leaving, flats, buffer, into_buffer=True)
                    )
                if not is_root and arrived:
                    staging.wait(
                        staging.start(arrived, flats, buffer, into_buffer=False)
                    )
                if not is_root and not leaving:
                    _put_back(params, flats)

        for arrived, leaving in pairwise([None, *batches, None]):
            with raise_together(group.handshake, f"{OPERATION}, copying parameters"):
                take_turn(arrived, leaving)
            if leaving:
                filled = buffer[
                    : leaving[-1].offset + leaving[-1].stop - leaving[-1].start
                ]
                group.host.broadcast([(root, filled)])


def _flat(data: Any, is_root: bool) -> Any:
    """Return the parameter's elements in C order, 1-D; memory for them if it is read-only."""
    if is_root or devices.on_gpu(data) or data.flags.writeable:
        return staging.flat(data)
    return np.empty(data.size, data.dtype)


def _put_back(params: list[Any], flats: list[Any]) -> None:
    """Write what has come into the parameters that aren't contiguous; replace those on the host."""
    for param, flat in zip(params, flats, strict=True):
        data = param.data
        if devices.on_gpu(data):
            if not data.flags.c_contiguous:
                staging.overwrite(data, flat.reshape(data.shape))
        elif not (data.flags.c_contiguous and data.flags.writeable):
            param.data = flat.reshape(data.shape)


def _bcast(group: ProcessGroup, sent: list[tuple[Any, int]]) -> None:
    """Overwrite each parameter on all ranks by that of the rank beside it (collective)."""
    for param, root in sent:
        data = param.data
        usable = data.flags.c_contiguous and (
            group.rank == root or data.flags.writeable
        )
        buffer = data if usable else np.array(data, order="C")
        group.host.broadcast([(root, buffer)])
        if group.rank != root and not usable:
            param.data = buffer
