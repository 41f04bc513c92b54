"""Means of a model's gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import devices
from ..allreduce import AlgorithmCache
from ..config import Settings
from ..errors import capture_error, describe_exception
from ..faults import abort_if_desynchronized
from ..messaging import Context
from .gradient_call import GradientCall, call_of, select, wire_dtypes_of


def mean_gradients(
    context: Context, algorithms: AlgorithmCache, model: Any, settings: Settings, zero_fill: bool
) -> None:
    """Replace each gradient by its mean over ranks (collective).

    The first gradients are packed before the handshake, which then also serves as the barrier that
    an algorithm needs between packing and summing.

    Args:
        context: the ranks.
        algorithms: for gradients in host memory and on GPUs.
        model: anything with ``namedparams()``; each ``grad`` is overwritten or replaced.
        settings: the communicator's.
        zero_fill: whether missing gradients count as zeros.

    Raises:
        RankMismatchError: on all ranks, when models differ in a name, shape or dtype, in the
            settings, in which gradients are on GPUs, or (without ``zero_fill``) in which are
            missing.
        TypeError: a gradient isn't a float array, or is complex and would travel as a float.
        MemoryError: a gradient that has to be replaced can't be allocated.
    """
    call, error = capture_error(
        lambda: _prepare(context, algorithms, model, settings, bool(zero_fill))
    )
    signature, payload = (call.signature, _pack_missing(call, zero_fill)) if call else ((), b"")
    payloads = context.handshake("allreduce_grad", signature, payload, error)
    if any(payloads):
        _add_zeros(context, call, payloads)
    elif call.finish:
        _run_or_abort(context, call.finish)
        _assign(call)
        return
    for on_gpu in (False, True):
        members = _members(call, on_gpu, settings, algorithms.stays_in_memory and not on_gpu)
        if members[0]:
            mean = algorithms.get(on_gpu).mean
            # The algorithms for GPUs send failures to the other ranks themselves.
            mean(*members) if on_gpu else _run_or_abort(context, mean, *members)
    _assign(call)


def _run_or_abort(context: Context, step: Callable[..., None], *args: Any) -> None:
    """Take steps that all ranks take together; an exception ends the job, as the others can't know.

    Where the user refused that, the interruption is recorded: the communicator can't be used any
    more.
    """
    try:
        step(*args)
    except BaseException as error:
        abort_if_desynchronized()
        context.interruptions.append(describe_exception(error))
        raise


def _prepare(
    context: Context, algorithms: AlgorithmCache, model: Any, settings: Settings, zero_fill: bool
) -> GradientCall:
    """Do everything that needs no other rank."""
    call = call_of(model, context.rank, zero_fill, settings, algorithms.stays_in_memory)
    algorithm = algorithms.cached(False)
    # With missing gradients there may be more to average than this rank knows; with some on
    # GPUs, two algorithms, and the errors of the second belong after the handshake.
    if algorithm and call.wire_dtypes is not None:
        call.finish = algorithm.stage(call.grads, call.targets, call.wire_dtypes)
    return call


def _members(
    call: GradientCall, on_gpu: bool, settings: Settings, in_memory: bool
) -> tuple[list[Any], list[Any], Sequence[np.dtype]]:
    """Return the gradients on GPUs, or the others; their targets; and their wire dtypes."""
    chosen = select(call.grads, on_gpu)
    sources = [call.grads[index] for index in chosen]
    places = sources if call.targets is call.grads else [call.targets[index] for index in chosen]
    wire_dtypes = wire_dtypes_of([source.dtype for source in sources], settings, in_memory, on_gpu)
    return sources, places, wire_dtypes


def _pack_missing(call: GradientCall, zero_fill: bool) -> bytes:
    """Return which gradients are missing here as bits; nothing if none is or may be."""
    if call.complete or not zero_fill:
        return b""
    return np.packbits([grad is None for grad in call.grads]).tobytes()


def _add_zeros(context: Context, call: GradientCall, payloads: list[bytes]) -> None:
    """Give this rank zeros for the gradients that only others have (collective)."""
    missing = [grad is None for grad in call.grads]
    zeros, error = capture_error(lambda: _zeros(call.params, missing, payloads))
    context.handshake("allreduce_grad, zeros", error=error)
    for index, array in zeros.items():
        call.grads[index] = call.targets[index] = array


def _assign(call: GradientCall) -> None:
    """Give each parameter the array that holds its mean, where that is another one."""
    if call.targets is call.grads and call.complete:
        return
    for param, target in zip(call.params, call.targets, strict=True):
        if param.grad is not target:
            param.grad = target


def _zeros(params: list[Any], missing: list[bool], payloads: list[bytes]) -> dict[int, Any]:
    """Return zeros, by index, for each gradient that only other ranks have."""
    somewhere = _present_somewhere(payloads, len(params))
    return {
        index: devices.module_of(param.data).zeros_like(param.data, order="C")
        for index, param in enumerate(params)
        if missing[index] and somewhere[index] and param.data is not None
    }


def _present_somewhere(payloads: list[bytes], count: int) -> np.ndarray:
    """Return (count,) bool: whether any rank has the gradient; who has all sends no payload."""
    if not all(payloads):
        return np.ones(count, bool)
    masks = [np.unpackbits(np.frombuffer(payload, np.uint8), count=count) for payload in payloads]
    present: np.ndarray = ~np.all(masks, axis=0)
    return present
