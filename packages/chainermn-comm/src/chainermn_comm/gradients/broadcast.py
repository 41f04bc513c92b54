"""Broadcasts a model's parameters, also to ranks that haven't initialised them yet."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import raise_together
from ..gpu import devices, staging
from ..messaging import ProcessGroup, backend_for, collectives, memory_of, messages
from . import parameters

OPERATION = "bcast_data"
# The most bytes of parameters that a rank receives at once beside its own, if one
# parameter isn't larger: a handshake costs little beside them.
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
    initialising = f"{OPERATION}, initialising parameters"
    with raise_together(group.handshake, initialising) as meeting:
        for each in sent:
            _initialise(each)
        own_memory = memory_of(group, [each.param.data for each in sent])
        meeting.payload = bytes([own_memory])
    memory = [payload[0] for payload in meeting.payloads]
    backend_for(group, OPERATION, memory)  # raises if ranks differ
    for batch in _batches(sent):
        root = batch[0].root
        params = [each.param for each in batch]
        own = tuple([param.data for param in params])
        found = collectives.bcast(group, OPERATION, own, messages.of_arrays, root)
        with group.together(f"{OPERATION}, copying parameters"):
            if group.rank != root:
                for param, array in zip(params, found, strict=True):
                    _assign(param, array, group.rank)


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
    """Yield the parameters of each root in batches, the same on all ranks."""
    batch: list[Sent] = []
    filled = 0
    for each in sorted(sent, key=lambda it: it.root):
        nbytes = each.param.data.nbytes
        is_other = batch and batch[0].root != each.root
        if is_other or filled + nbytes > BATCH_BYTES:
            if batch:
                yield batch
            batch = []
            filled = 0
        batch.append(each)
        filled += nbytes
    if batch:
        yield batch


def _assign(param: Any, array: Any, rank: int) -> None:
    """Overwrite the parameter's array, or replace it if it is read-only."""
    device = devices.device_of(param.data)
    if devices.device_of(array) != device:
        if devices.on_gpu(array):
            (array,) = staging.to_host([array], rank)
        if device is not None:
            with devices.use(device):
                (array,) = staging.to_device([array], rank)
    if device is not None:
        devices.assign(param.data, array)
    elif param.data.flags.writeable:
        param.data[...] = array
    else:
        param.data = array
