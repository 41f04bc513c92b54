"""One rank's gradients in a bucket: what must be equal on all ranks, and what moves."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .. import devices
from ..config import Settings
from ..layout import Operand
from ..messaging import Backend, ProcessGroup, digest_of
from . import parameters

NOT_INITIALISED = "not initialised (bcast_data would bring it)"


@dataclass(frozen=True, eq=False)
class GradientSignature:
    """What must be equal on all ranks: settings, and each gradient's name, dtype and shape.

    They are the entries of a handshake's signature, in the order of the parameters'
    names. Dtype and shape of a missing gradient are its parameter's.
    """

    entries: tuple[tuple[Any, ...], ...]
    digest: bytes  # equal where entries are
    nbytes: int  # of all gradients


# The digest, which a handshake needs, takes a millisecond of 161 gradients.
@lru_cache(maxsize=256)
def _signature_of(entries: tuple[tuple[Any, ...], ...]) -> GradientSignature:
    specs = [
        entry[2:4] for entry in entries if entry[0] == "parameter" and len(entry) > 3
    ]
    nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in specs)
    return GradientSignature(entries, digest_of(entries), nbytes)


# As for `_plain`: of each update of a loop the buckets are those of the one before.
@lru_cache(maxsize=256)
def joined(signatures: tuple[GradientSignature, ...]) -> GradientSignature:
    """Return the signature that the gradients of several buckets would have in one."""
    entries = [entry for each in signatures for entry in each.entries]
    named = [entry for entry in entries if entry[0] == "parameter"]
    common = dict.fromkeys(entry for entry in entries if entry[0] != "parameter")
    return _signature_of((*common, *sorted(named, key=operator.itemgetter(1))))


@dataclass
class Bucket:
    """One rank's gradients, in the order of the parameters' names."""

    params: list[Any]
    grads: list[Any]  # None where there is none
    # Where the means are to be written; the list `grads` itself if all can be
    # overwritten.
    targets: list[Any]
    signature: GradientSignature
    complete: bool  # no gradient is missing
    # The dtypes in which the present gradients travel, if all of them are NumPy's; else
    # None.
    wire_dtypes: Sequence[np.dtype] | None
    # What is missing travels as zeros, and the means go to new memory.
    planned: bool = False
    ready: Any = None  # if planned, on a GPU: the event after which gradients are there

    @property
    def on_gpu(self) -> bool:
        """Whether the first parameter is on a GPU; where it was planned, all are."""
        return devices.on_gpu(self.params[0].data)

    def operands(
        self, settings: Settings, group: ProcessGroup
    ) -> list[tuple[Backend, Operand]]:
        """Return what a group's ranks sum in host memory and on GPUs, with the backend."""
        sources, targets = self.grads, self.targets
        if not self.complete:
            present = [
                index for index, grad in enumerate(self.grads) if grad is not None
            ]
            sources, targets = (
                [each[i] for i in present] for each in (sources, targets)
            )
        if self.wire_dtypes:
            return [
                (group.host, Operand(sources, targets, self.wire_dtypes, group.size))
            ]
        found, is_local = [], group.host.is_local
        for on_gpu, backend in ((False, group.host), (True, group.device)):
            members = [
                i for i, grad in enumerate(sources) if devices.on_gpu(grad) == on_gpu
            ]
            chosen, into = [sources[i] for i in members], [targets[i] for i in members]
            dtypes = [grad.dtype for grad in chosen]
            wire_dtypes = wire_dtypes_of(dtypes, settings, is_local, on_gpu)
            if members:
                found.append((backend, Operand(chosen, into, wire_dtypes, group.size)))
        return found

    def planned_operand(self, settings: Settings, group: ProcessGroup) -> Operand:
        """Return what a group's ranks sum if it was planned, zeros included; means are new arrays.

        On a GPU what follows on the current stream comes after the gradients.
        """
        like = [param.data for param in self.params]
        on_gpu = self.on_gpu
        if self.ready is not None:
            devices.current_stream().wait_event(self.ready)
        sources = [
            devices.zeros_like(data) if grad is None else grad
            for data, grad in zip(like, self.grads, strict=True)
        ]
        dtypes = [data.dtype for data in like]
        wire_dtypes = wire_dtypes_of(dtypes, settings, group.host.is_local, on_gpu)
        flat = None
        if not on_gpu and len({*dtypes, *wire_dtypes}) == 1:
            flat = np.empty(sum([data.size for data in like]), dtypes[0])
            ends = list(accumulate([data.size for data in like]))
            pieces = np.split(flat, ends[:-1])
            self.targets = [
                piece.reshape(data.shape)
                for piece, data in zip(pieces, like, strict=True)
            ]
        else:
            self.targets = [devices.empty_like(data) for data in like]
        return Operand(sources, self.targets, wire_dtypes, group.size, flat=flat)

    def add_zeros(self, present: np.ndarray) -> None:
        """Let zeros travel for each gradient that is missing here and ``present`` somewhere."""
        self.wire_dtypes = None
        for index, (param, grad) in enumerate(
            zip(self.params, self.grads, strict=True)
        ):
            if grad is None and present[index] and param.data is not None:
                self.grads[index] = self.targets[index] = devices.zeros_like(param.data)

    def assign(self, present: np.ndarray | None) -> None:
        """Give parameters their means; ``present``, if given, says which some rank has."""
        if self.targets is self.grads and self.complete:
            return
        for index, (param, target) in enumerate(
            zip(self.params, self.targets, strict=True)
        ):
            is_mean = self.grads[index] is not None or (
                self.planned and present is not None and present[index]
            )
            if is_mean and param.grad is not target:
                param.grad = target


def bucket_of(
    model: Any,
    rank: int,
    zero_fill: bool,
    settings: Settings,
    is_local: bool,
    planned: bool,
) -> Bucket:
    """Return the bucket of the model's present gradients.

    ``is_local`` says whether gradients in host memory go through no network.

    Raises:
        TypeError: a gradient isn't a float array, or is complex and would travel as a
            float.
        MemoryError: a gradient that has to be replaced can't be allocated.
    """
    names, params = parameters.names_and_params(model, rank)
    grads = [param.grad for param in params]
    known, complete = None, True
    if set(map(type, grads)) <= {np.ndarray}:
        specs = tuple([(grad.dtype, grad.shape, grad.flags.num) for grad in grads])
        known = _plain(settings, zero_fill, is_local, names, specs)
    if known is None:
        named = list(zip(names, params, strict=True))
        signature = _checked_signature(named, grads, rank, zero_fill, settings)
        present = [grad for grad in grads if grad is not None]
        complete, wire_dtypes = len(present) == len(grads), None
        if set(map(type, present)) <= {np.ndarray}:
            wire_dtypes = wire_dtypes_of(
                [grad.dtype for grad in present], settings, is_local
            )
        known = _Known(signature, wire_dtypes, False)
    is_apart = known.own_memory and len(set(map(id, grads))) == len(grads)
    targets = [] if planned else grads if is_apart else _targets(grads)
    return Bucket(
        params, grads, targets, known.signature, complete, known.wire_dtypes, planned
    )


def _checked_signature(
    named: list[tuple[str, Any]],
    grads: list[Any],
    rank: int,
    zero_fill: bool,
    settings: Settings,
) -> GradientSignature:
    """Return the signature of gradients that may be missing, on a GPU, or of any other type.

    Gradients of uninitialised parameters become None in ``grads``, and NumPy's scalars
    arrays.
    """
    wire = settings.allreduce_grad_dtype
    entries = _common_entries(settings, zero_fill)
    for index, (name, param) in enumerate(named):
        data = param.data
        given = None if data is None else grads[index]
        grad = grads[index] = parameters.checked(given, name, rank)
        if grad is not given:  # a NumPy scalar: the mean needs an array to go to
            param.grad = grad
        like = data if grad is None else grad
        if like is None:
            entries.append(("parameter", name, NOT_INITIALISED))
            continue
        if wire is not None and like.dtype.kind == "c":
            raise TypeError(
                f"rank {rank}: parameter {name} is complex, and would lose its imaginary part "
                f"as {wire}; set allreduce_grad_dtype to None"
            )
        where = ("on a GPU",) if devices.on_gpu(like) else ()
        missing = ("no gradient",) if grad is None and not zero_fill else ()
        entries.append(("parameter", name, like.dtype, like.shape, *where, *missing))
    return _signature_of(tuple(entries))


class _Known(NamedTuple):
    """What follows from the specs of gradients."""

    signature: GradientSignature
    wire_dtypes: Sequence[np.dtype] | None
    own_memory: bool  # each owns its memory, and a result may be written there


# Loops repeat few different buckets; computing this again would take as long as summing
# the gradients of a small model.
@lru_cache(maxsize=256)
def _plain(
    settings: Settings,
    zero_fill: bool,
    is_local: bool,
    names: tuple[str, ...],
    specs: tuple[tuple[np.dtype, tuple[int, ...], int], ...],
) -> _Known | None:
    """Return it of NumPy arrays with these dtypes, shapes and flags; None where one isn't real."""
    dtypes = tuple([dtype for dtype, _, _ in specs])
    if any(dtype.kind != "f" for dtype in dtypes):
        return None
    entries = _common_entries(settings, zero_fill)
    entries += [
        ("parameter", name, *spec[:2]) for name, spec in zip(names, specs, strict=True)
    ]
    own_memory = parameters.OWN_MEMORY
    own = all(flags & own_memory == own_memory for _, _, flags in specs)
    return _Known(
        _signature_of(tuple(entries)), wire_dtypes_of(dtypes, settings, is_local), own
    )


def wire_dtypes_of(
    dtypes: Sequence[np.dtype], settings: Settings, is_local: bool, on_gpu: bool = False
) -> Sequence[np.dtype]:
    """Return the dtypes in which gradients of these dtypes travel.

    Those that stay in memory travel in no narrower dtype than their own. In host memory
    a gradient as wide as the wire dtype is not cast: float16 as bfloat16 and back can
    overflow, and bfloat16 as float16 more so.
    """
    wire = settings.allreduce_grad_dtype
    if wire is None:
        return tuple(dtypes)
    if on_gpu:
        return (wire,) * len(dtypes)
    most = math.inf if is_local else wire.itemsize
    return tuple(
        [dtype if wire.itemsize <= dtype.itemsize <= most else wire for dtype in dtypes]
    )


def _common_entries(settings: Settings, zero_fill: bool) -> list[tuple[Any, ...]]:
    """Return the entries of the signature that concern all gradients."""
    return [
        ("zero_fill", zero_fill),
        ("allreduce_grad_dtype", str(settings.allreduce_grad_dtype)),
        ("chunk_bytes", settings.chunk_bytes),
    ]


def _targets(grads: list[Any]) -> list[Any]:
    """Return the gradients, with a new array in place of each that can't be written to."""
    usable = parameters.own_memory([grad for grad in grads if grad is not None])
    if all(usable):
        return grads
    own = iter(usable)
    return [
        grad if grad is None or next(own) else devices.empty_like(grad)
        for grad in grads
    ]
