"""Broadcasts a model's parameters, also to ranks that haven't initialised them yet."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np

from .. import devices
from ..errors import RankMismatchError
from ..messaging import Context, SharedFailure, bcast_buffer
from . import parameters

OPERATION = "bcast_data"


def bcast_parameters(context: Context, model: Any) -> None:
    """Give every rank the parameters of rank 0 (collective).

    A parameter that rank 0 hasn't initialised comes from the lowest rank that has; one that
    no rank has is left alone.
    """
    with SharedFailure(context.handshake, OPERATION):
        named = parameters.named(model, context.rank)
        arrays = [parameters.checked(param.data, name, context.rank) for name, param in named]
        own_specs = [None if array is None else (array.shape, array.dtype) for array in arrays]
    signature = tuple([("parameter", name) for name, _ in named])
    nbytes = sum(dtype.itemsize * math.prod(shape) for shape, dtype in filter(None, own_specs))
    arguments = OPERATION, signature, pickle.dumps(own_specs), nbytes
    payloads = context.run_in_step(OPERATION, context.handshake, *arguments)
    rows = [pickle.loads(payload) for payload in payloads]
    # Each parameter that is sent, with the rank that sends it, and its shape and dtype there.
    sent: list[tuple[Any, int, tuple[int, ...], np.dtype]] = []
    for (name, param), specs in zip(named, zip(*rows, strict=True), strict=True):
        having = [(rank, *spec) for rank, spec in enumerate(specs) if spec is not None]
        if len(set(specs) - {None}) > 1:
            listed = "; ".join(f"{dtype} {shape} on rank {rank}" for rank, shape, dtype in having)
            raise RankMismatchError(
                f"bcast_data on rank {context.rank}: ranks disagree on parameter {name}: {listed}"
            )
        sent += [(param, *first) for first in having[:1]]

    initialising = f"{OPERATION}, initialising parameters"
    with SharedFailure(context.handshake, initialising):
        for param, _, shape, dtype in sent:
            if param.data is None:
                if hasattr(param, "initialize"):
                    param.initialize(shape)
                if param.data is None or param.data.shape != shape or param.data.dtype != dtype:
                    param.data = np.empty(shape, dtype)
    context.run_in_step(OPERATION, context.handshake, initialising)
    context.run_in_step(OPERATION, _bcast, context, [each[:2] for each in sent])


def _bcast(context: Context, sent: list[tuple[Any, int]]) -> None:
    """Overwrite each parameter on all ranks by that of the rank beside it (collective)."""
    for param, root in sent:
        data = param.data
        if devices.on_gpu(data):
            host = np.ascontiguousarray(devices.to_host(data))
            bcast_buffer(context.comm, host.reshape(-1), root)
            if context.rank != root:
                data[...] = devices.to_device(host)
            continue
        usable = data.flags.c_contiguous and (context.rank == root or data.flags.writeable)
        buffer = data if usable else np.array(data, order="C")
        bcast_buffer(context.comm, buffer.reshape(-1), root)
        if context.rank != root and not usable:
            param.data = buffer
