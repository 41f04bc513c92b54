"""Means of a model's gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import devices, parameters
from .agreement import prepare
from .collectives import Group
from .layout import Layout
from .reducer import Reducer
from .settings import Settings


def mean_gradients(
    group: Group,
    reducer_of: Callable[[bool], Reducer],
    model: Any,
    settings: Settings,
    zero_fill: bool,
) -> None:
    """Replace each gradient by its mean over ranks (collective).

    Args:
        group: the ranks.
        reducer_of: gives the reducer for gradients on GPUs (True) or not (False); called on
            all ranks alike.
        model: whose gradients are meant.
        settings: the communicator's.
        zero_fill: whether missing gradients count as zeros.

    Raises:
        RankMismatchError: on all ranks, when models differ in a name, shape or dtype, in the
            settings, in which gradients lie on GPUs, or (without ``zero_fill``) in which are
            missing.
        TypeError: a gradient isn't a float array, or is complex and would travel as a float.
        MemoryError: there is none for a gradient that has to be replaced.
    """
    found, problem = prepare(lambda: _gradients(model, group.rank, bool(zero_fill), settings))
    params, grads, targets, layout = found or ([], [], [], ())
    missing = [grad is None for grad in grads]
    incomplete = any(missing)
    note = np.packbits(missing).tobytes() if incomplete and zero_fill else b""
    notes = group.agreement("allreduce_grad", layout, note, problem)
    if any(notes):
        zeros, problem = prepare(lambda: _zeros(params, missing, notes))
        group.agreement("allreduce_grad, zeros", problem=problem)
        for index, array in zeros.items():
            grads[index] = targets[index] = array
    for on_gpu in (False, True):
        chosen = _those(grads, on_gpu)
        if chosen:
            sources = [grads[index] for index in chosen]
            places = sources if targets is grads else [targets[index] for index in chosen]
            wires = [settings.allreduce_grad_dtype or source.dtype for source in sources]
            reducer_of(on_gpu).mean(sources, places, wires)
    if targets is not grads or incomplete:
        for param, target in zip(params, targets, strict=True):
            if param.grad is not target:
                param.grad = target


def _those(grads: list[Any], on_gpu: bool) -> Sequence[int]:
    """Where the gradients stand that exist and lie on GPUs, or don't."""
    if set(map(type, grads)) <= {np.ndarray}:
        return () if on_gpu else range(len(grads))
    return [
        index
        for index, grad in enumerate(grads)
        if grad is not None and devices.on_gpu(grad) == on_gpu
    ]


def _gradients(
    model: Any, rank: int, zero_fill: bool, settings: Settings
) -> tuple[list[Any], list[Any], list[Any], Layout]:
    """In the order of names: the parameters, their gradients, where the means are to be written.

    Also what ranks must agree on.
    """
    named = parameters.named(model, rank)
    names, params = tuple([name for name, _ in named]), [param for _, param in named]
    grads = [param.grad for param in params]
    likes = grads
    notes: tuple[tuple[str, ...], ...] = ()
    if not _all_plain(grads):
        datas = [param.data for param in params]
        for index, (name, param) in enumerate(named):
            grad = None if datas[index] is None else grads[index]
            grads[index] = parameters.checked(grad, name, rank)
            if grads[index] is not grad:  # a NumPy scalar: the mean needs an array to go to
                param.grad = grads[index]
        likes = [data if grad is None else grad for data, grad in zip(datas, grads, strict=True)]
        notes = tuple(
            [_note(grad, like, zero_fill) for grad, like in zip(grads, likes, strict=True)]
        )
    dtypes = tuple([None if like is None else like.dtype for like in likes])
    shapes = tuple([None if like is None else like.shape for like in likes])
    wire = settings.allreduce_grad_dtype
    if wire is not None and any(dtype is not None and dtype.kind == "c" for dtype in set(dtypes)):
        index = next(i for i, dtype in enumerate(dtypes) if dtype is not None and dtype.kind == "c")
        raise TypeError(
            f"rank {rank}: parameter {names[index]} is complex, and would lose its imaginary part "
            f"as {wire}; set allreduce_grad_dtype to None"
        )
    shared = (
        ("zero_fill", zero_fill),
        ("allreduce_grad_dtype", str(wire)),
        ("chunk_bytes", settings.chunk_bytes),
    )
    layout = Layout(shared, names, dtypes, shapes, notes if any(notes) else ())
    return params, grads, _targets(grads), layout


def _targets(grads: list[Any]) -> list[Any]:
    """The gradients, but for a new array in place of each that can't be written to."""
    usable = parameters.own_memory([grad for grad in grads if grad is not None])
    if all(usable):
        return grads
    own = iter(usable)
    return [
        grad if grad is None or next(own) else devices.module_of(grad).empty(grad.shape, grad.dtype)
        for grad in grads
    ]


def _zeros(params: list[Any], missing: list[bool], notes: list[bytes]) -> dict[int, Any]:
    """A gradient for each parameter, by its place, whose gradient only other ranks have."""
    somewhere = _present_somewhere(notes, len(params))
    return {
        index: devices.module_of(param.data).zeros_like(param.data, order="C")
        for index, param in enumerate(params)
        if missing[index] and somewhere[index] and param.data is not None
    }


def _all_plain(grads: list[Any]) -> bool:
    """Whether all are NumPy arrays of floats, as they are in most calls."""
    return set(map(type, grads)) <= {np.ndarray} and all(
        dtype.kind in "fc" for dtype in {grad.dtype for grad in grads}
    )


def _note(grad: Any, like: Any, zero_fill: bool) -> tuple[str, ...]:
    """What ranks must agree on beside names, dtypes and shapes."""
    where = type(like) is not np.ndarray and like is not None and devices.on_gpu(like)
    missing = grad is None and like is not None and not zero_fill
    return ("on a GPU",) * where + ("no gradient",) * missing


def _present_somewhere(notes: list[bytes], count: int) -> np.ndarray:
    """For each gradient, whether any rank has it; a rank that has all sends an empty note."""
    if not all(notes):
        return np.ones(count, bool)
    masks = [np.unpackbits(np.frombuffer(note, np.uint8), count=count) for note in notes]
    return ~np.all(masks, axis=0)
