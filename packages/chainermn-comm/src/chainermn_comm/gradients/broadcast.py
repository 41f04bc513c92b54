"""Broadcasts of a model's parameters, to ranks that haven't initialised them yet too."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np

from .. import devices
from ..allreduce.transport import Transport
from ..errors import RankMismatchError
from ..messaging.collectives import Group
from ..messaging.handshake import prepare
from . import parameters

# Shape and dtype of a parameter.
Form = tuple[tuple[int, ...], np.dtype]


def bcast_parameters(group: Group, transport: Transport, model: Any) -> None:
    """Give every rank the parameters of rank 0 (collective).

    A parameter that rank 0 hasn't initialised comes from the lowest rank that has; one that
    no rank has is left alone.

    Raises:
        RankMismatchError: on all ranks, when models differ in a name, shape or dtype.
        TypeError: a parameter isn't a float array.
    """
    found, problem = prepare(lambda: _forms(model, group.rank))
    named, mine = found or ([], [])
    view = tuple([("parameter", name) for name, _ in named])
    nbytes = sum(dtype.itemsize * math.prod(shape) for shape, dtype in filter(None, mine))
    notes = group.agreement("bcast_data", view, pickle.dumps(mine), problem, nbytes=nbytes)
    rows = [pickle.loads(note) for note in notes]
    sources = [
        _source(group, name, [row[index] for row in rows]) for index, (name, _) in enumerate(named)
    ]
    _, problem = prepare(lambda: _initialise(named, mine, sources))
    group.agreement("bcast_data, initialising parameters", problem=problem)
    for (_, param), source in zip(named, sources, strict=True):
        if source is None:
            continue
        root, _ = source
        data = param.data
        if devices.on_gpu(data):
            host = np.ascontiguousarray(devices.to_host(data))
            transport.bcast(host.reshape(-1), root)
            if group.rank != root:
                data[...] = devices.to_device(host)
            continue
        usable = data.flags.c_contiguous and (group.rank == root or data.flags.writeable)
        buffer = data if usable else np.array(data, order="C")
        transport.bcast(buffer.reshape(-1), root)
        if group.rank != root and not usable:
            param.data = buffer


def _forms(model: Any, rank: int) -> tuple[list[tuple[str, Any]], list[Form | None]]:
    named = parameters.named(model, rank)
    arrays = [parameters.checked(param.data, name, rank) for name, param in named]
    return named, [None if array is None else (array.shape, array.dtype) for array in arrays]


def _source(group: Group, name: str, forms: list[Form | None]) -> tuple[int, Form] | None:
    """The rank that gives a parameter, and its form there; None where no rank has it."""
    having = [(rank, form) for rank, form in enumerate(forms) if form is not None]
    if not having:
        return None
    if any(form != having[0][1] for _, form in having):
        listed = "; ".join(f"{dtype} {shape} on rank {rank}" for rank, (shape, dtype) in having)
        raise RankMismatchError(
            f"bcast_data on rank {group.rank}: ranks disagree on parameter {name}: {listed}"
        )
    return having[0]


def _initialise(
    named: list[tuple[str, Any]], mine: list[Form | None], sources: list[tuple[int, Form] | None]
) -> None:
    for (_, param), form, source in zip(named, mine, sources, strict=True):
        if form is None and source is not None:
            shape, dtype = source[1]
            if hasattr(param, "initialize"):
                param.initialize(shape)
            if param.data is None or param.data.shape != shape or param.data.dtype != dtype:
                param.data = np.empty(shape, dtype)
