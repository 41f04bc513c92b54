"""Means of a model's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import devices, parameters
from .agreement import prepare
from .collectives import Group
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
    found, problem = prepare(lambda: (bool(zero_fill), *_gradients(model, group.rank)))
    zero_fill, params, grads, view = found or (False, [], [], [])
    missing = [grad is None for grad in grads]
    settings = [("zero_fill", zero_fill), ("allreduce_grad_dtype", str(wire))]
    if not zero_fill and any(missing):
        view = [(*row, "no gradient") if no else row for row, no in zip(view, missing, strict=True)]
    note = np.packbits(missing).tobytes() if zero_fill and any(missing) else b""
    notes = group.agreement("allreduce_grad", (*settings, *view), note, problem)
    if any(missing):
        somewhere = _present_somewhere(notes, len(params)) if zero_fill else [False] * len(params)
        for index, param in enumerate(params):
            if missing[index] and somewhere[index] and param.data is not None:
                grads[index] = devices.module_of(param.data).zeros_like(param.data, order="C")
    here: list[int] = []
    there: list[int] = []
    for index, grad in enumerate(grads):
        if grad is not None:
            on_gpu = type(grad) is not np.ndarray and devices.on_gpu(grad)
            (there if on_gpu else here).append(index)
    for on_gpu, chosen in ((False, here), (True, there)):
        if chosen:
            _mean(reducer_of(on_gpu), params, grads, chosen, missing, wire)


def _mean(
    reducer: Reducer,
    params: list[Any],
    grads: list[Any],
    chosen: list[int],
    missing: list[bool],
    wire: np.dtype | None,
) -> None:
    """Take the mean of the gradients chosen by their indices, and give it to the parameters."""
    sources = [grads[index] for index in chosen]
    usable = parameters.own_memory(sources)
    targets = sources
    if not all(usable):
        targets = [
            grad if own else devices.module_of(grad).empty(grad.shape, grad.dtype)
            for grad, own in zip(sources, usable, strict=True)
        ]
    reducer.mean(sources, targets, [wire or grad.dtype for grad in sources])
    for index, own, target in zip(chosen, usable, targets, strict=True):
        if missing[index] or not own:
            params[index].grad = target


def _gradients(model: Any, rank: int) -> tuple[list[Any], list[Any], list[tuple[Any, ...]]]:
    """The parameters, their gradients, and what ranks must agree on, in the order of names."""
    params, grads = [], []
    view: list[tuple[Any, ...]] = []
    good = None  # the dtype of the last gradient that was checked
    for name, param in parameters.named(model, rank):
        data = param.data
        like = grad = None if data is None else param.grad
        if type(grad) is not np.ndarray or grad.dtype is not good:
            checked = parameters.checked(grad, name, rank)
            if checked is not grad:  # a NumPy scalar: the mean needs an array to go to
                param.grad = grad = checked
            like = data if grad is None else grad
            good = None if grad is None else grad.dtype
        params.append(param)
        grads.append(grad)
        if like is None:
            view.append(("parameter", name, "not initialised (bcast_data would bring it)"))
        else:
            view.append(("parameter", name, like.dtype, like.shape))
            if type(like) is not np.ndarray and devices.on_gpu(like):
                view[-1] += ("on a GPU",)
    return params, grads, view


def _present_somewhere(notes: list[bytes], count: int) -> np.ndarray:
    """For each gradient, whether any rank has it; a rank that has all sends an empty note."""
    if not all(notes):
        return np.ones(count, bool)
    masks = [np.unpackbits(np.frombuffer(note, np.uint8), count=count) for note in notes]
    return ~np.all(masks, axis=0)
