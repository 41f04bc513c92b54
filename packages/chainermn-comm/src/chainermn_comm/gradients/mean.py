"""Means of a model's gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import devices
from ..allreduce.reducers import Reducers
from ..arrays import wider
from ..config import Settings
from ..errors import describe_exception
from ..faults.abort import abort_if_desynchronized
from ..messaging.collectives import Group
from ..messaging.handshake import prepare
from . import parameters
from .signature import Layout


@dataclass
class _Call:
    """One rank's part of a call, in the order of the parameters' names.

    Attributes:
        params: the parameters.
        grads: their gradients; None where there is none.
        targets: where the means are to be written; ``grads`` itself where that serves.
        layout: what ranks must agree on.
        complete: whether no gradient is missing.
        wires: how all gradients travel, if none is missing and all are NumPy's; else None.
        begun: what is left of the reducer's work, which may begin before ranks agree.
    """

    params: list[Any]
    grads: list[Any]
    targets: list[Any]
    layout: Layout
    complete: bool
    wires: Sequence[np.dtype] | None = None
    begun: Callable[[], None] | None = None


def mean_gradients(
    group: Group, reducers: Reducers, model: Any, settings: Settings, zero_fill: bool
) -> None:
    """Replace each gradient by its mean over ranks (collective).

    A small model's gradients are packed before ranks agree: their agreement is then also the
    meeting that a reducer needs between packing and summing, which saves it one.

    Args:
        group: the ranks.
        reducers: for gradients on GPUs and for others.
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
    call, problem = prepare(lambda: _begin(group, reducers, model, settings, bool(zero_fill)))
    layout, note = (call.layout, _note_of(call, zero_fill)) if call else ((), b"")
    notes = group.agreement("allreduce_grad", layout, note, problem)
    if any(notes):
        _add_zeros(group, call, notes)
    elif call.begun:
        _in_step(group, call.begun)
        _hand_over(call)
        return
    for on_gpu in (False, True):
        members = _members(call, on_gpu, settings, reducers.in_memory_only and not on_gpu)
        if members[0]:
            mean = reducers.get(on_gpu).mean
            # Those of GPUs tell the other ranks by themselves.
            mean(*members) if on_gpu else _in_step(group, mean, *members)
    _hand_over(call)


def _in_step(group: Group, step: Callable[..., None], *args: Any) -> None:
    """Do what all ranks do together; an exception ends the job, as the others are in the middle.

    Where it doesn't, since the user refused that, the group is of no use any more.
    """
    try:
        step(*args)
    except BaseException as error:
        abort_if_desynchronized()
        group.interruptions.append(describe_exception(error))
        raise


def _begin(
    group: Group, reducers: Reducers, model: Any, settings: Settings, zero_fill: bool
) -> _Call:
    """All that needs no other rank."""
    call = _gradients(model, group.rank, zero_fill, settings, reducers.in_memory_only)
    reducer = reducers.made(False)
    # With missing gradients there may be more to average than this rank knows; with some on
    # GPUs, two reducers, and the errors of the second are for after the agreement.
    if reducer and call.wires is not None:
        call.begun = reducer.begin(call.grads, call.targets, call.wires)
    return call


def _members(
    call: _Call, on_gpu: bool, settings: Settings, in_memory: bool
) -> tuple[list[Any], list[Any], Sequence[np.dtype]]:
    """The gradients that lie on GPUs, or don't; where their means go; how they travel."""
    chosen = _those(call.grads, on_gpu)
    sources = [call.grads[index] for index in chosen]
    places = sources if call.targets is call.grads else [call.targets[index] for index in chosen]
    wires = _wires([source.dtype for source in sources], settings, in_memory, on_gpu)
    return sources, places, wires


def _note_of(call: _Call, zero_fill: bool) -> bytes:
    """Which gradients are missing here, if they may be."""
    if call.complete or not zero_fill:
        return b""
    return np.packbits([grad is None for grad in call.grads]).tobytes()


def _add_zeros(group: Group, call: _Call, notes: list[bytes]) -> None:
    """Give this rank zeros for the gradients that only others have (collective)."""
    missing = [grad is None for grad in call.grads]
    zeros, problem = prepare(lambda: _zeros(call.params, missing, notes))
    group.agreement("allreduce_grad, zeros", problem=problem)
    for index, array in zeros.items():
        call.grads[index] = call.targets[index] = array


def _hand_over(call: _Call) -> None:
    """Give each parameter the array that holds its mean, where that is another one."""
    if call.targets is call.grads and call.complete:
        return
    for param, target in zip(call.params, call.targets, strict=True):
        if param.grad is not target:
            param.grad = target


def _those(grads: list[Any], on_gpu: bool) -> Sequence[int]:
    """Where the gradients stand that exist and lie on GPUs, or don't."""
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
    """The call as the model stands."""
    named = parameters.named(model, rank)
    names, params = tuple([name for name, _ in named]), [param for _, param in named]
    grads = [param.grad for param in params]
    if not _all_numpy(grads):
        return _checked(named, grads, rank, zero_fill, settings, in_memory)
    plain = _plain(settings, zero_fill, in_memory, names, _forms(grads))
    if plain is None:
        return _checked(named, grads, rank, zero_fill, settings, in_memory)
    apart = plain.own_memory and len(set(map(id, grads))) == len(grads)
    targets = grads if apart else _targets(grads)
    return _Call(params, grads, targets, plain.layout, True, plain.wires)


def layout_of(
    settings: Settings, zero_fill: bool, names: tuple[str, ...], grads: list[np.ndarray]
) -> Layout:
    """What ranks agree on for gradients of floats, found as a call finds it; for the benchmark."""
    plain = _plain(settings, zero_fill, False, names, _forms(grads))
    assert plain is not None
    return plain.layout


def _forms(grads: list[np.ndarray]) -> tuple[tuple[np.dtype, tuple[int, ...], int], ...]:
    return tuple([(grad.dtype, grad.shape, grad.flags.num) for grad in grads])


class _Plain(NamedTuple):
    """What follows from the forms of gradients that all are NumPy arrays of real floats.

    Attributes:
        layout: what ranks must agree on.
        wires: how they travel.
        own_memory: whether each owns its memory, and a result may be written there.
    """

    layout: Layout
    wires: Sequence[np.dtype]
    own_memory: bool


# Loops repeat few different calls, and to make these anew would take as long as to add the
# gradients of a small model.
@lru_cache(maxsize=8)
def _plain(
    settings: Settings,
    zero_fill: bool,
    in_memory: bool,
    names: tuple[str, ...],
    forms: tuple[tuple[np.dtype, tuple[int, ...], int], ...],
) -> _Plain | None:
    """Of gradients with these dtypes, shapes and flags; None where some dtype is another one."""
    dtypes = tuple([dtype for dtype, _, _ in forms])
    if any(dtype.kind != "f" for dtype in dtypes):
        return None
    shapes = tuple([shape for _, shape, _ in forms])
    layout = Layout(_shared(settings, zero_fill), names, dtypes, shapes)
    own = all(parameters.owns_usable_memory(flags) for _, _, flags in forms)
    return _Plain(layout, _wires(dtypes, settings, in_memory), own)


def _wires(
    dtypes: Sequence[np.dtype], settings: Settings, in_memory: bool, on_gpu: bool = False
) -> Sequence[np.dtype]:
    """How gradients of these dtypes travel; in memory only, in nothing narrower than they are.

    In host memory those of the wire's width travel as they are: as bfloat16 the largest of float16
    would become infinite when they are float16 again, and the other way round more.
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
    """The call where gradients may be missing, on a GPU, or anything else."""
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
    notes = tuple([_note(grad, like, zero_fill) for grad, like in zip(grads, likes, strict=True)])
    names = tuple([name for name, _ in named])
    shared = _shared(settings, zero_fill)
    layout = Layout(shared, names, dtypes, shapes, notes if any(notes) else ())
    complete = not any([grad is None for grad in grads])
    # Whether there are wires decides when ranks meet: it must follow from what they agree on.
    wires = None
    if _all_numpy(grads):
        wires = _wires([grad.dtype for grad in grads], settings, in_memory)
    return _Call(params, grads, _targets(grads), layout, complete, wires)


@lru_cache(maxsize=8)
def _shared(settings: Settings, zero_fill: bool) -> tuple[tuple[str, Any], ...]:
    """What ranks must agree on for all gradients together."""
    return (
        ("zero_fill", zero_fill),
        ("allreduce_grad_dtype", str(settings.allreduce_grad_dtype)),
        ("chunk_bytes", settings.chunk_bytes),
    )


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


def _all_numpy(grads: list[Any]) -> bool:
    return set(map(type, grads)) <= {np.ndarray}


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
    present: np.ndarray = ~np.all(masks, axis=0)
    return present
