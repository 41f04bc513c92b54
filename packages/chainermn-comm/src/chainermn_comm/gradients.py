"""Means of a model's gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import parameters
from .agreement import prepare
from .collectives import Group
from .reducer import Reducer


def mean_gradients(
    group: Group,
    reducer: Reducer,
    model: Any,
    wire: np.dtype | None,
    zero_fill: bool,
) -> None:
    """Replace each gradient by its mean over ranks (collective).

    Raises:
        RankMismatchError: on all ranks, when models differ in a name, shape or dtype, in the
            wire dtype, or (without ``zero_fill``) in which gradients are missing.
        TypeError: a gradient isn't a float array.
    """
    found, problem = prepare(lambda: _gradients(model, group.rank))
    params, grads, view = found or ([], [], [])
    missing = [grad is None for grad in grads]
    settings = [("zero_fill", zero_fill), ("allreduce_grad_dtype", str(wire))]
    if not zero_fill:
        view = [(*row, "no gradient") if no else row for row, no in zip(view, missing, strict=True)]
    note = np.packbits(missing).tobytes() if zero_fill and any(missing) else b""
    notes = group.agreement("allreduce_grad", (*settings, *view), note, problem)
    if any(missing):
        somewhere = _present_somewhere(notes, len(params)) if zero_fill else [False] * len(params)
        for index, param in enumerate(params):
            if missing[index] and somewhere[index] and param.data is not None:
                grads[index] = np.zeros_like(param.data, order="C")
    chosen = [index for index, grad in enumerate(grads) if grad is not None]
    sources = [grads[index] for index in chosen]
    targets = [
        grad if usable else np.empty(grad.shape, grad.dtype)
        for grad, usable in zip(sources, parameters.own_memory(sources), strict=True)
    ]
    reducer.mean(sources, targets, [wire or grad.dtype for grad in sources])
    for index, source, target in zip(chosen, sources, targets, strict=True):
        if missing[index] or target is not source:
            params[index].grad = target


def _gradients(model: Any, rank: int) -> tuple[list[Any], list[Any], list[tuple[Any, ...]]]:
    """The parameters, their gradients, and what ranks must agree on, in the order of names."""
    params, grads = [], []
    view: list[tuple[Any, ...]] = []
    for name, param in parameters.named(model):
        grad = parameters.checked(param.grad if param.data is not None else None, name, rank)
        like = param.data if grad is None else grad
        params.append(param)
        grads.append(grad)
        if like is None:
            view.append(("parameter", name, "not initialised (bcast_data would bring it)"))
        else:
            view.append(("parameter", name, like.dtype, like.shape))
    return params, grads, view


def _present_somewhere(notes: list[bytes], count: int) -> np.ndarray:
    """For each gradient, whether any rank has it; a rank that has all sends an empty note."""
    if not all(notes):
        return np.ones(count, bool)
    masks = [np.unpackbits(np.frombuffer(note, np.uint8), count=count) for note in notes]
    return ~np.all(masks, axis=0)
