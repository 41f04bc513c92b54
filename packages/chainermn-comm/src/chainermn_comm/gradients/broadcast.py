"""Broadcasts a model's parameters, also to ranks that haven't initialised them yet."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import raise_together
from ..gpu import devices
from ..messaging import ProcessGroup, choose_backend, memory_of, messages
from ..parts import part_entries
from . import parameters

OPERATION = "bcast_data"


@dataclass
class Sent:
    """A parameter that ranks receive."""

    param: Any
    root: int  # the rank that sends it
    shape: tuple[int, ...]  # there
    dtype: np.dtype


def bcast_parameters(group: ProcessGroup, model: Any) -> None:
    """Give every rank the parameters of rank 0 (collective).

    A parameter that rank 0 hasn't initialised comes from the lowest rank that has
    initialised it. If no rank has, the parameter is left alone. Arrays are received in
    place if possible.
    """
    rank = group.rank
    sent = _choose_roots(group, model)
    with group.together(f"{OPERATION}, initialising parameters") as call:
        for each in sent:
            _initialise(each)
        arrays = [_in_c_order(each.param.data) for each in sent]
        call.payload = bytes([memory_of(group, arrays)])
    memory = [payload[0] for payload in call.payloads]
    backend, is_copied = choose_backend(group, OPERATION, memory)
    on_gpu = [index for index, array in enumerate(arrays) if devices.on_gpu(array)]
    message = messages.Message(messages.TUPLE, tuple(arrays), on_gpu=tuple(on_gpu))
    if is_copied:
        with group.together(f"{OPERATION}, copying to host memory"):
            (message,) = messages.on_host([message], rank)
    roots = [each.root for each in sent]
    backend.broadcast(zip(roots, message.arrays, strict=True))
    with group.together(f"{OPERATION}, copying parameters"):
        if is_copied:
            with devices.using_device_of(arrays[on_gpu[0]]):
                (message,) = messages.on_device([message], rank)
        for each, array in zip(sent, message.arrays, strict=True):
            if each.root != rank and array is not each.param.data:
                _assign(each.param, array)


def _choose_roots(group: ProcessGroup, model: Any) -> list[Sent]:
    """Return the parameters that some rank has, all ranks the same (collective)."""
    with raise_together(group.handshake, OPERATION) as call:
        named = parameters.named(model, group.rank)
        specs: list[tuple[tuple[int, ...], np.dtype] | None] = []
        for name, param in named:
            array = parameters.checked(param.data, name, group.rank)
            if array is None:
                specs.append(None)
            else:
                specs.append((array.shape, array.dtype))
                call.nbytes += array.nbytes
        names = [("parameter", name) for name, _ in named]
        call.signature = (*names, *part_entries(named))
        call.payload = pickle.dumps(specs)
    rows = [pickle.loads(payload) for payload in call.payloads]
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


def _in_c_order(array: Any) -> Any:
    """Return the array if bytes in C order can overwrite it, otherwise a copy."""
    if devices.on_gpu(array):
        return devices.c_ordered(array)
    if array.flags.c_contiguous and array.flags.writeable:
        return array
    return np.array(array, order="C")


def _assign(param: Any, array: Any) -> None:
    """Overwrite the parameter's array, or replace it if it is read-only."""
    if devices.on_gpu(param.data):
        devices.assign(param.data, array)
    elif param.data.flags.writeable:
        param.data[...] = array
    else:
        param.data = array
