"""Broadcasts a model's parameters, also to ranks that haven't initialised them yet."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import raise_together
from ..gpu import devices, staging
from ..messaging import ON_GPU, ProcessGroup, backend_for, memory_of, messages
from . import parameters

OPERATION = "bcast_data"
# The most bytes of parameters on GPUs that pass through host memory at once, if one
# parameter isn't larger: what a copy costs to begin is little beside these.
BATCH_BYTES = 32 << 20


@dataclass
class Sent:
    """A parameter that ranks receive."""

    param: Any
    root: int  # the rank that sends it
    shape: tuple[int, ...]  # there
    dtype: np.dtype


def bcast_parameters(group: ProcessGroup, model: Any) -> None:
    """Give every rank the parameters of rank 0 (collective).

    A parameter that rank 0 hasn't initialised comes from the lowest rank that has; one
    that no rank has is left alone.
    """
    sent = _choose_roots(group, model)
    with raise_together(
        group.handshake, f"{OPERATION}, initialising parameters"
    ) as meeting:
        for each in sent:
            _initialise(each)
        arrays = [each.param.data for each in sent]
        own = memory_of(group, arrays)
        meeting.payload = bytes([own])
    memory = [payload[0] for payload in meeting.payloads]
    backend = backend_for(group, OPERATION, memory)
    if backend is group.host:
        are_on_gpus = any([each & ON_GPU for each in memory])
        for batch in _batches(sent):
            _bcast_on_host(group, batch, are_on_gpus)
        return
    with group.together(f"{OPERATION}, making arrays contiguous"):
        flats = list(map(devices.c_ordered, arrays))
    roots = [each.root for each in sent]
    backend.broadcast(list(zip(roots, flats, strict=True)))
    for array, flat in zip(arrays, flats, strict=True):
        if flat is not array:
            devices.assign(array, flat)


def _choose_roots(group: ProcessGroup, model: Any) -> list[Sent]:
    """Return the parameters that some rank has, all ranks the same (collective)."""
    with raise_together(group.handshake, OPERATION) as meeting:
        named = parameters.named(model, group.rank)
        specs: list[tuple[tuple[int, ...], np.dtype] | None] = []
        for name, param in named:
            array = parameters.checked(param.data, name, group.rank)
            if array is None:
                specs.append(None)
            else:
                specs.append((array.shape, array.dtype))
                meeting.nbytes += array.nbytes
        meeting.signature = tuple([("parameter", name) for name, _ in named])
        meeting.payload = pickle.dumps(specs)
    rows = [pickle.loads(payload) for payload in meeting.payloads]
    sent = []
    for (name, param), by_rank in zip(named, zip(*rows, strict=True), strict=True):
        found = {rank: spec for rank, spec in enumerate(by_rank) if spec is not None}
        if len(set(found.values())) > 1:
            shape, dtype = by_rank[group.rank] or ("none", "")
            entry = ("parameter", name, str(dtype), shape)
            group.handshake.raise_mismatch(OPERATION, (entry,))
        if found:
            root = min(found)
            sent.append(Sent(param, root, *found[root]))
    return sent


def _initialise(sent: Sent) -> None:
    """Give the parameter an array like the root's if it has none (not collective)."""
    param = sent.param
    if param.data is not None:
        return
    if hasattr(param, "initialize"):
        param.initialize(sent.shape)
    data = param.data
    if data is None or data.shape != sent.shape or data.dtype != sent.dtype:
        param.data = np.empty(sent.shape, sent.dtype)


def _batches(sent: list[Sent]) -> Iterator[list[Sent]]:
    """Yield the parameters in batches that are the same on all ranks."""
    batch: list[Sent] = []
    filled = 0
    for each in sent:
        nbytes = each.param.data.nbytes
        if batch and filled + nbytes > BATCH_BYTES:
            yield batch
            batch = []
            filled = 0
        batch.append(each)
        filled += nbytes
    if batch:
        yield batch


def _bcast_on_host(group: ProcessGroup, sent: list[Sent], are_on_gpus: bool) -> None:
    """Overwrite parameters by way of host memory (collective).

    If ``are_on_gpus`` on some rank, ranks check that all could copy.
    """
    rank = group.rank
    together: Callable[[str], AbstractContextManager[Any]] = nullcontext
    if are_on_gpus:
        together = group.together
    with together(f"{OPERATION}, copying to host memory"):
        own = [each.param.data for each in sent if each.root == rank]
        copies = iter(messages.of_array_on_host(own, rank).arrays)
        buffers = []
        for each in sent:
            data = each.param.data
            if each.root == rank:
                buffer = np.ascontiguousarray(next(copies))
            elif isinstance(data, np.ndarray) and _can_receive(data):
                buffer = data
            else:
                buffer = np.empty(each.shape, each.dtype)
            buffers.append(buffer)
    roots = [each.root for each in sent]
    group.host.broadcast(list(zip(roots, buffers, strict=True)))
    with together(f"{OPERATION}, copying to GPUs"):
        received: dict[Any, list[tuple[Any, np.ndarray]]] = {}
        for each, buffer in zip(sent, buffers, strict=True):
            if each.root != rank:
                device = devices.device_of(each.param.data)
                received.setdefault(device, []).append((each.param, buffer))
        for device, pairs in received.items():
            _fill(device, pairs, rank)


def _can_receive(data: np.ndarray) -> bool:
    return data.flags.c_contiguous and data.flags.writeable


def _fill(
    device: int | None, received: list[tuple[Any, np.ndarray]], rank: int
) -> None:
    """Put what has come into parameters that lie on one device, or in host memory."""
    if device is None:
        for param, array in received:
            param.data = array
        return
    with devices.use(device):
        copies = staging.to_device([array for _, array in received], rank)
        for (param, _), copy in zip(received, copies, strict=True):
            devices.assign(param.data, copy)
