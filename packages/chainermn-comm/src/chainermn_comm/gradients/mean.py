"""Means of a model's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import devices
from ..allreduce import AlgorithmCache
from ..config import Settings
from ..messaging import Context, SharedFailure
from .gradient_call import GradientCall, call_of, wire_dtypes_of

OPERATION, DESCRIPTION = "allreduce_grad", "a mean of gradients"


def mean_gradients(
    context: Context, algorithms: AlgorithmCache, model: Any, settings: Settings, zero_fill: bool
) -> None:
    """Replace each gradient by its mean over ranks (collective).

    The first gradients are packed before the handshake, which then also serves as the barrier that
    an algorithm needs between packing and summing.
    """
    in_memory = algorithms.stays_in_memory
    with SharedFailure(context.handshake, OPERATION):
        zero_fill = bool(zero_fill)
        call = call_of(model, context.rank, zero_fill, settings, in_memory)
        algorithm = algorithms.made.get(False)
        finish: Callable[[], None] | None = None
        # With missing gradients there may be more to average than this rank knows; with some on
        # GPUs, two algorithms, and the errors of the second belong after the handshake.
        if algorithm and call.wire_dtypes is not None:
            finish = algorithm.stage(call.grads, call.targets, call.wire_dtypes)
        missing = b""
        if zero_fill and not call.complete:
            missing = np.packbits([grad is None for grad in call.grads]).tobytes()
    payloads = context.run_in_step(
        DESCRIPTION, context.handshake, OPERATION, call.signature, missing
    )
    if any(payloads):
        _add_zeros(context, call, payloads)
    elif finish:
        context.run_in_step(DESCRIPTION, finish)
        _assign(call)
        return
    for on_gpu in (False, True):
        members = [
            index
            for index, grad in enumerate(call.grads)
            if grad is not None and devices.on_gpu(grad) == on_gpu
        ]
        if members:
            mean = algorithms.get(on_gpu).mean
            sources = [call.grads[index] for index in members]
            targets = [call.targets[index] for index in members]
            dtypes = [source.dtype for source in sources]
            wire_dtypes = wire_dtypes_of(dtypes, settings, in_memory, on_gpu)
            if on_gpu:  # these algorithms send failures to the other ranks themselves
                mean(sources, targets, wire_dtypes)
            else:
                context.run_in_step(DESCRIPTION, mean, sources, targets, wire_dtypes)
    _assign(call)


def _add_zeros(context: Context, call: GradientCall, payloads: list[bytes]) -> None:
    """Give this rank zeros for the gradients that only others have (collective)."""
    present = np.ones(len(call.grads), bool)
    if all(payloads):  # a rank that has all gradients sends none
        bits = [np.frombuffer(payload, np.uint8) for payload in payloads]
        present = ~np.all([np.unpackbits(each, count=len(present)) for each in bits], axis=0)
    zeros = context.handshake.run_on_all_ranks(f"{OPERATION}, zeros", lambda: _zeros(call, present))
    for index, array in zeros.items():
        call.grads[index] = call.targets[index] = array


def _zeros(call: GradientCall, present: np.ndarray) -> dict[int, Any]:
    """Return zeros, by index, for each gradient that is missing here and ``present`` somewhere."""
    return {
        index: devices.module_of(param.data).zeros_like(param.data, order="C")
        for index, (param, grad) in enumerate(zip(call.params, call.grads, strict=True))
        if grad is None and present[index] and param.data is not None
    }


def _assign(call: GradientCall) -> None:
    """Give each parameter the array that holds its mean, where that is another one."""
    if call.targets is call.grads and call.complete:
        return
    for param, target in zip(call.params, call.targets, strict=True):
        if param.grad is not target:
            param.grad = target
