"""Broadcasts a model's parameters, also to ranks that haven't initialised them yet."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np

from .. import devices, staging
from ..devices import on_gpu
from ..errors import RankMismatchError, raised_on_all
from ..messaging import ProcessGroup, SharedFailure, collectives
from . import parameters

OPERATION = "bcast_data"


def bcast_parameters(group: ProcessGroup, model: Any) -> None:
    """Give every rank the parameters of rank 0 (collective).

    A parameter that rank 0 hasn't initialised comes from the lowest rank that has; one that
    no rank has is left alone.
    """
    with SharedFailure(group.handshake, OPERATION):
        named = parameters.named(model, group.rank)
        arrays = [parameters.checked(param.data, name, group.rank) for name, param in named]
        own_specs = [None if array is None else (array.shape, array.dtype) for array in arrays]
    signature = tuple([("parameter", name) for name, _ in named])
    nbytes = sum(dtype.itemsize * math.prod(shape) for shape, dtype in filter(None, own_specs))
    payloads = group.handshake(OPERATION, signature, pickle.dumps(own_specs), nbytes)
    rows = [pickle.loads(payload) for payload in payloads]
    # Each parameter that is sent, with the rank that sends it, and its shape and dtype there.
    sent: list[tuple[Any, int, tuple[int, ...], np.dtype]] = []
    for (name, param), specs in zip(named, zip(*rows, strict=True), strict=True):
        having = [(rank, *spec) for rank, spec in enumerate(specs) if spec is not None]
        if len(set(specs) - {None}) > 1:
            listed = "; ".join(f"{dtype} {shape} on rank {rank}" for rank, shape, dtype in having)
            text = f"ranks disagree on parameter {name}: {listed}"
            raise raised_on_all(RankMismatchError(f"bcast_data on rank {group.rank}: {text}"))
        sent += [(param, *first) for first in having[:1]]

    initialising = f"{OPERATION}, initialising parameters"
    with SharedFailure(group.handshake, initialising):
        for param, _, shape, dtype in sent:
            if param.data is None:
                if hasattr(param, "initialize"):
                    param.initialize(shape)
                if param.data is None or param.data.shape != shape or param.data.dtype != dtype:
                    param.data = np.empty(shape, dtype)
    with SharedFailure(group.handshake, initialising):
        arrays, takes = [param.data for param, *_ in sent], group.device_takes
        own = [root == group.rank for _, root, *_ in sent]
        place = collectives.COPIED * any(map(on_gpu, arrays))
        if place and takes is not None and takes(arrays):
            place = collectives.STAYS | collectives.CAN_STAY
        with devices.translated_errors(f"rank {group.rank}: {OPERATION}"):
            buffers = list(map(_buffer, arrays, own))
    places = [row[0] for row in group.handshake(initialising, (), bytes([place]))]
    backend, _ = collectives.agreed(group, OPERATION, places, [])
    is_copied = any(places) and backend is group.host
    if is_copied:
        buffers = group.run_or_raise(OPERATION, lambda: _on_host(buffers, own, group.rank))
    backend.broadcast([(root, each) for (_, root, *_), each in zip(sent, buffers, strict=True)])

    def take() -> None:
        come = [i for i, array in enumerate(arrays) if not own[i] and buffers[i] is not array]
        to_gpu = [i for i in come if on_gpu(arrays[i])]
        if is_copied and to_gpu:
            with devices.using_device_of(arrays[to_gpu[0]]):
                copies = staging.to_device([buffers[i] for i in to_gpu], group.rank)
            for index, copy in zip(to_gpu, copies, strict=True):
                buffers[index] = copy
        for index in come:
            if index in to_gpu:
                devices.assign(arrays[index], buffers[index])
            else:
                sent[index][0].data = buffers[index]

    if is_copied:
        group.run_or_raise(OPERATION, take, "copying parameters")
    else:
        take()


def _buffer(data: Any, is_root: bool) -> Any:
    """Return the parameter, or a copy of one that isn't in C order or can't be written."""
    if on_gpu(data):
        return devices.c_ordered(data)
    usable = data.flags.c_contiguous and (is_root or data.flags.writeable)
    return data if usable else np.array(data, order="C")


def _on_host(buffers: list[Any], own: list[bool], rank: int) -> list[np.ndarray]:
    """Return copies of this rank's own on GPUs, and room for those of others."""
    pairs = list(zip(buffers, own, strict=True))
    mine = iter(staging.to_host([each for each, is_own in pairs if is_own and on_gpu(each)], rank))
    return [
        (next(mine) if is_own else np.empty(each.shape, each.dtype)) if on_gpu(each) else each
        for each, is_own in pairs
    ]
