"""Means of a model's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import devices, parameters
from .agreement import prepare
from .collectives import Group
from .layout import Layout
from .reducer import Reducer


def mean_gradients(
    group: Group,
    reducer_of: Callable[[bool], Reducer],
    model: Any,
    wire: np.dtype | None,
    zero_fill: bool,
) -> None:
    """Replace each gradient by its mean over ranks (collective).

    Args:
        group: the ranks.
        reducer_of: gives the reducer for gradients on GPUs (True) or not (False); called on
            all ranks alike.
        model: whose gradients are meant.
        wire: the dtype in which gradients travel; None for each one's own.
        zero_fill: whether missing gradients count as zeros.

    Raises:
        RankMismatchError: on all ranks, when models differ in a name, shape or dtype, in the
            wire dtype, in which gradients lie on GPUs, or (without ``zero_fill``) in which are
            missing.
        TypeError: a gradient isn't a float array.
    """
    found, problem = prepare(lambda: _gradients(model, group.rank, bool(zero_fill), wire))
    params, grads, layout = found or ([], [], ())
    missing = [grad is None for grad in grads]
    incomplete = any(missing)
    note = np.packbits(missing).tobytes() if incomplete and zero_fill else b""
    notes = group.agreement("allreduce_grad", layout, note, problem)
    if incomplete and zero_fill:
        somewhere = _present_somewhere(notes, len(params))
        for index, param in enumerate(params):
            if missing[index] and somewhere[index] and param.data is not None:
                grads[index] = devices.module_of(param.data).zeros_like(param.data, order="C")
    if set(map(type, grads)) == {np.ndarray}:
        _mean(reducer_of(False), params, grads, wire, incomplete)
        return
    for on_gpu in (False, True):
        chosen = [
            index
            for index, grad in enumerate(grads)
            if grad is not None
            and (type(grad) is not np.ndarray and devices.on_gpu(grad)) == on_gpu
        ]
        if chosen:
            those, theirs = [params[i] for i in chosen], [grads[i] for i in chosen]
            _mean(reducer_of(on_gpu), those, theirs, wire, incomplete)


def _mean(
    reducer: Reducer, params: list[Any], grads: list[Any], wire: np.dtype | None, incomplete: bool
) -> None:
    """Take the mean of gradients, and give it to the parameters.

    Args:
        reducer: the way of these gradients.
        params: the parameters.
        grads: their gradients, zeros where a parameter has none.
        wire: the dtype in which they travel; None for each one's own.
        incomplete: whether some parameter has none.
    """
    usable = parameters.own_memory(grads)
    targets = grads
    if not all(usable):
        targets = [
            grad if own else devices.module_of(grad).empty(grad.shape, grad.dtype)
            for grad, own in zip(grads, usable, strict=True)
        ]
    reducer.mean(grads, targets, [wire or grad.dtype for grad in grads])
    if targets is not grads or incomplete:
        for param, target in zip(params, targets, strict=True):
            if param.grad is not target:
                param.grad = target


def _gradients(
    model: Any, rank: int, zero_fill: bool, wire: np.dtype | None
) -> tuple[list[Any], list[Any], Layout]:
    """The parameters, their gradients, and what ranks must agree on, in the order of names."""
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
    settings = (("zero_fill", zero_fill), ("allreduce_grad_dtype", str(wire)))
    return params, grads, Layout(settings, names, dtypes, shapes, notes if any(notes) else ())


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
