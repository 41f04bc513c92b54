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

# Shape and dtype of a parameter.
ArraySpec = tuple[tuple[int, ...], np.dtype]


def bcast_parameters(context: Context, model: Any) -> None:
    """Give every rank the parameters of rank 0 (collective).

    A parameter that rank 0 hasn't initialised comes from the lowest rank that has; one that
    no rank has is left alone.

    Raises:
        RankMismatchError: on all ranks, when models differ in a name, shape or dtype.
        TypeError: a parameter isn't a float array.
    """
    with SharedFailure(context.handshake, "bcast_data"):
        named = parameters.named(model, context.rank)
        arrays = [parameters.checked(param.data, name, context.rank) for name, param in named]
        own_specs = [None if array is None else (array.shape, array.dtype) for array in arrays]
    signature = tuple([("parameter", name) for name, _ in named])
    nbytes = sum(dtype.itemsize * math.prod(shape) for shape, dtype in filter(None, own_specs))
    payloads = context.handshake("bcast_data", signature, pickle.dumps(own_specs), nbytes)
    rows = [pickle.loads(payload) for payload in payloads]
    sources = [
        _source(context, name, [row[index] for row in rows])
        for index, (name, _) in enumerate(named)
    ]
    context.handshake.run_on_all_ranks(
        "bcast_data, initialising parameters", lambda: _initialise(named, own_specs, sources)
    )
    for (_, param), source in zip(named, sources, strict=True):
        if source is None:
            continue
        root, _ = source
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


def _source(
    context: Context, name: str, specs: list[ArraySpec | None]
) -> tuple[int, ArraySpec] | None:
    """Return the rank that sends a parameter, and its spec there; None where no rank has it."""
    having = [(rank, spec) for rank, spec in enumerate(specs) if spec is not None]
    if not having:
        return None
    if any(spec != having[0][1] for _, spec in having):
        listed = "; ".join(f"{dtype} {shape} on rank {rank}" for rank, (shape, dtype) in having)
        raise RankMismatchError(
            f"bcast_data on rank {context.rank}: ranks disagree on parameter {name}: {listed}"
        )
    return having[0]


def _initialise(
    named: list[tuple[str, Any]],
    own_specs: list[ArraySpec | None],
    sources: list[tuple[int, ArraySpec] | None],
) -> None:
    for (_, param), spec, source in zip(named, own_specs, sources, strict=True):
        if spec is None and source is not None:
            shape, dtype = source[1]
            if hasattr(param, "initialize"):
                param.initialize(shape)
            if param.data is None or param.data.shape != shape or param.data.dtype != dtype:
                param.data = np.empty(shape, dtype)
