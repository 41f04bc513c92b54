"""Means of a model's gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import devices
from ..allreduce import AlgorithmCache
from ..arrays import wider
from ..config import Settings
from ..errors import describe_exception
from ..faults.abort import end_out_of_step
from ..messaging import Context, capture_error
from . import parameters
from .signature import GradientSignature


@dataclass
class _Call:
    """One rank's part of a call, in the order of the parameters' names.

    Attributes:
        params: the parameters.
        grads: their gradients; None where there is none.
        targets: where the means are to be written; ``grads`` itself where that serves.
        signature: what must be equal on all ranks.
        complete: whether no gradient is missing.
        wire_dtypes: the dtypes in which all gradients travel, if none is missing and all are
            NumPy's; else None.
        finish: the rest of the algorithm's work, where a part was done before the handshake.
    """

    params: list[Any]
    grads: list[Any]
    targets: list[Any]
    signature: GradientSignature
    complete: bool
    wire_dtypes: Sequence[np.dtype] | None = None
    finish: Callable[[], None] | None = None


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
        _in_step(context, call.finish)
        _assign(call)
        return
    for on_gpu in (False, True):
        members = _members(call, on_gpu, settings, algorithms.stays_in_memory and not on_gpu)
        if members[0]:
            mean = algorithms.get(on_gpu).mean
            # The algorithms for GPUs send failures to the other ranks themselves.
            mean(*members) if on_gpu else _in_step(context, mean, *members)
    _assign(call)


def _in_step(context: Context, step: Callable[..., None], *args: Any) -> None:
    """Take steps that all ranks take together; an exception ends the job, as the others can't know.

    Where the user refused that, the interruption is recorded: the communicator can't be used any
    more.
    """
    try:
        step(*args)
    except BaseException as error:
        end_out_of_step()
        context.interruptions.append(describe_exception(error))
        raise


def _prepare(
    context: Context, algorithms: AlgorithmCache, model: Any, settings: Settings, zero_fill: bool
) -> _Call:
    """Do everything that needs no other rank."""
    call = _gradients(model, context.rank, zero_fill, settings, algorithms.stays_in_memory)
    algorithm = algorithms.cached(False)
    # With missing gradients there may be more to average than this rank knows; with some on
    # GPUs, two algorithms, and the errors of the second belong after the handshake.
    if algorithm and call.wire_dtypes is not None:
        call.finish = algorithm.stage(call.grads, call.targets, call.wire_dtypes)
    return call


def _members(
    call: _Call, on_gpu: bool, settings: Settings, in_memory: bool
) -> tuple[list[Any], list[Any], Sequence[np.dtype]]:
    """Return the gradients on GPUs, or the others; their targets; and their wire dtypes."""
    chosen = _select(call.grads, on_gpu)
    sources = [call.grads[index] for index in chosen]
    places = sources if call.targets is call.grads else [call.targets[index] for index in chosen]
    wire_dtypes = _wire_dtypes([source.dtype for source in sources], settings, in_memory, on_gpu)
    return sources, places, wire_dtypes


def _pack_missing(call: _Call, zero_fill: bool) -> bytes:
    """Return which gradients are missing here as bits; nothing if none is or may be."""
    if call.complete or not zero_fill:
        return b""
    return np.packbits([grad is None for grad in call.grads]).tobytes()


def _add_zeros(context: Context, call: _Call, payloads: list[bytes]) -> None:
    """Give this rank zeros for the gradients that only others have (collective)."""
    missing = [grad is None for grad in call.grads]
    zeros, error = capture_error(lambda: _zeros(call.params, missing, payloads))
    context.handshake("allreduce_grad, zeros", error=error)
    for index, array in zeros.items():
        call.grads[index] = call.targets[index] = array


def _assign(call: _Call) -> None:
    """Give each parameter the array that holds its mean, where that is another one."""
    if call.targets is call.grads and call.complete:
        return
    for param, target in zip(call.params, call.targets, strict=True):
        if param.grad is not target:
            param.grad = target


def _select(grads: list[Any], on_gpu: bool) -> Sequence[int]:
    """Return the indices of the gradients that exist and are on GPUs, or aren't."""
    if _all_numpy(grads):
        return () if on_gpu else range(len(grads))
    return [
        index
        for index, grad in enumerate(grads)
        if grad is not None and devices.on_gpu(grad) == on_gpu
    ]


def _gradients(
    model: Any, rank: int, zero_fill: bool, settings: Settings, in_memory: bool
) -> _Call:
    """Return the call for the model's present gradients."""
    named = parameters.named(model, rank)
    names, params = tuple([name for name, _ in named]), [param for _, param in named]
    grads = [param.grad for param in params]
    if not _all_numpy(grads):
        return _checked(named, grads, rank, zero_fill, settings, in_memory)
    fast = _fast_path(settings, zero_fill, in_memory, names, _array_specs(grads))
    if fast is None:
        return _checked(named, grads, rank, zero_fill, settings, in_memory)
    apart = fast.own_memory and len(set(map(id, grads))) == len(grads)
    targets = grads if apart else _targets(grads)
    return _Call(params, grads, targets, fast.signature, True, fast.wire_dtypes)


def _array_specs(grads: list[np.ndarray]) -> tuple[tuple[np.dtype, tuple[int, ...], int], ...]:
    return tuple([(grad.dtype, grad.shape, grad.flags.num) for grad in grads])


class _FastPath(NamedTuple):
    """What follows from the specs of gradients that all are NumPy arrays of real floats.

    Attributes:
        signature: what must be equal on all ranks.
        wire_dtypes: the dtypes in which they travel.
        own_memory: whether each owns its memory, and a result may be written there.
    """

    signature: GradientSignature
    wire_dtypes: Sequence[np.dtype]
    own_memory: bool


# Loops repeat few different calls; computing this again would take as long as summing the gradients
# of a small model.
@lru_cache(maxsize=8)
def _fast_path(
    settings: Settings,
    zero_fill: bool,
    in_memory: bool,
    names: tuple[str, ...],
    specs: tuple[tuple[np.dtype, tuple[int, ...], int], ...],
) -> _FastPath | None:
    """Return the fast path for these dtypes, shapes and flags; None where a dtype isn't real."""
    dtypes = tuple([dtype for dtype, _, _ in specs])
    if any(dtype.kind != "f" for dtype in dtypes):
        return None
    shapes = tuple([shape for _, shape, _ in specs])
    signature = GradientSignature(_common_entries(settings, zero_fill), names, dtypes, shapes)
    own = all(parameters.owns_usable_memory(flags) for _, _, flags in specs)
    return _FastPath(signature, _wire_dtypes(dtypes, settings, in_memory), own)


def _wire_dtypes(
    dtypes: Sequence[np.dtype], settings: Settings, in_memory: bool, on_gpu: bool = False
) -> Sequence[np.dtype]:
    """Return the dtypes in which gradients of these dtypes travel.

    Those that stay in memory travel in no narrower dtype than their own. In host memory those of
    the wire dtype's width keep their own: as bfloat16 the largest numbers of float16 would become
    infinite when they are float16 again, and the other way round even more would.
    """
    wire = settings.allreduce_grad_dtype
    if wire is None:
        return tuple(dtypes)
    if on_gpu:
        return (wire,) * len(dtypes)
    return tuple(
        [
            wider(dtype, wire) if in_memory or dtype.itemsize == wire.itemsize else wire
            for dtype in dtypes
        ]
    )


def _checked(
    named: list[tuple[str, Any]],
    grads: list[Any],
    rank: int,
    zero_fill: bool,
    settings: Settings,
    in_memory: bool,
) -> _Call:
    """Return the call where gradients may be missing, on a GPU, or of any other type."""
    params = [param for _, param in named]
    datas = [param.data for param in params]
    for index, (name, param) in enumerate(named):
        grad = None if datas[index] is None else grads[index]
        grads[index] = parameters.checked(grad, name, rank)
        if grads[index] is not grad:  # a NumPy scalar: the mean needs an array to go to
            param.grad = grads[index]
    likes = [data if grad is None else grad for data, grad in zip(datas, grads, strict=True)]
    dtypes = tuple([None if like is None else like.dtype for like in likes])
    shapes = tuple([None if like is None else like.shape for like in likes])
    wire = settings.allreduce_grad_dtype
    for (name, _), dtype in zip(named, dtypes, strict=True):
        if wire is not None and dtype is not None and dtype.kind == "c":
            raise TypeError(
                f"rank {rank}: parameter {name} is complex, and would lose its imaginary part "
                f"as {wire}; set allreduce_grad_dtype to None"
            )
    annotations = tuple(
        [_annotate(grad, like, zero_fill) for grad, like in zip(grads, likes, strict=True)]
    )
    names = tuple([name for name, _ in named])
    common = _common_entries(settings, zero_fill)
    signature = GradientSignature(
        common, names, dtypes, shapes, annotations if any(annotations) else ()
    )
    complete = not any([grad is None for grad in grads])
    # Whether there are wire dtypes decides what precedes the handshake, so it must follow from what
    # is equal on all ranks.
    wire_dtypes = None
    if _all_numpy(grads):
        wire_dtypes = _wire_dtypes([grad.dtype for grad in grads], settings, in_memory)
    return _Call(params, grads, _targets(grads), signature, complete, wire_dtypes)


@lru_cache(maxsize=8)
def _common_entries(settings: Settings, zero_fill: bool) -> tuple[tuple[str, Any], ...]:
    """Return the entries of the signature that concern all gradients."""
    return (
        ("zero_fill", zero_fill),
        ("allreduce_grad_dtype", str(settings.allreduce_grad_dtype)),
        ("chunk_bytes", settings.chunk_bytes),
    )


def _targets(grads: list[Any]) -> list[Any]:
    """Return the gradients, with a new array in place of each that can't be written to."""
    usable = parameters.own_memory([grad for grad in grads if grad is not None])
    if all(usable):
        return grads
    own = iter(usable)
    return [
        grad if grad is None or next(own) else devices.module_of(grad).empty(grad.shape, grad.dtype)
        for grad in grads
    ]


def _zeros(params: list[Any], missing: list[bool], payloads: list[bytes]) -> dict[int, Any]:
    """Return zeros, by index, for each gradient that only other ranks have."""
    somewhere = _present_somewhere(payloads, len(params))
    return {
        index: devices.module_of(param.data).zeros_like(param.data, order="C")
        for index, param in enumerate(params)
        if missing[index] and somewhere[index] and param.data is not None
    }


def _all_numpy(grads: list[Any]) -> bool:
    return set(map(type, grads)) <= {np.ndarray}


def _annotate(grad: Any, like: Any, zero_fill: bool) -> tuple[str, ...]:
    """Return what else must be equal on all ranks beside name, dtype and shape."""
    where = type(like) is not np.ndarray and like is not None and devices.on_gpu(like)
    missing = grad is None and like is not None and not zero_fill
    return ("on a GPU",) * where + ("no gradient",) * missing


def _present_somewhere(payloads: list[bytes], count: int) -> np.ndarray:
    """Return (count,) bool: whether any rank has the gradient; who has all sends no payload."""
    if not all(payloads):
        return np.ones(count, bool)
    masks = [np.unpackbits(np.frombuffer(payload, np.uint8), count=count) for payload in payloads]
    present: np.ndarray = ~np.all(masks, axis=0)
    return present
