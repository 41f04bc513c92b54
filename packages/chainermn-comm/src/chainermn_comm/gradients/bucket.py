"""One rank's gradients in a bucket: facts that all ranks must share, and arrays that move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..config import Settings
from ..gpu import devices
from ..layout import Operand
from ..messaging import Backend, ProcessGroup, digest_of
from ..parts import part_entries
from . import parameters

NOT_INITIALISED = "not initialised (bcast_data would bring it)"
UNKNOWN = 0  # stands for an unknown owner of memory
# NumPy's flags of an array that is C-contiguous, owns its memory, and may be written to.
OWN_MEMORY = 0x1 | 0x4 | 0x400


# A gradient's name, dtype (None if the parameter isn't initialised), shape, and whether
# the gradient is present.
Spec: TypeAlias = tuple[str, np.dtype | None, tuple[int, ...], bool]


class Description(NamedTuple):
    """The facts about gradients that must be equal on all ranks."""

    # Each gradient's name, dtype and shape (of a missing gradient the parameter's), as
    # entries of a handshake's signature.
    entries: list[tuple[Any, ...]]
    digest: bytes  # equal if these and the common entries are equal
    missing: bytes  # a digest of which gradients are missing
    nbytes: int  # bytes of this rank's gradients


@dataclass
class Bucket:
    """One rank's gradients, in the order of the parameters' names."""

    params: list[Any]
    grads: list[Any]  # None for a missing gradient
    on_gpu: bool  # whether they are on a GPU, or else in host memory
    # The arrays for the means: gradients that can be overwritten, and new arrays. None in
    # place of a gradient that doesn't travel.
    targets: list[Any]
    description: Description

    def __post_init__(self) -> None:
        # The arrays that travel: gradients, and zeros for missing ones.
        self.sources = self.grads
        # Which gradients exist on some rank. Until ranks have compared, which exist on
        # this rank.
        self.present = [grad is not None for grad in self.grads]
        # If this rank has begun with the means, a function that finishes them.
        self.finish: Callable[[], None] | None = None

    @property
    def arrays_on_gpu(self) -> list[Any]:
        """The arrays of parameters on a GPU."""
        if not self.on_gpu:
            return []
        return [param.data for param in self.params if param.data is not None]

    def add_zeros(self, wanted: Sequence[bool]) -> None:
        """Let zeros travel in place of wanted gradients that are missing here."""
        self.sources = list(self.sources)
        for index, is_wanted in enumerate(wanted):
            if is_wanted and self.sources[index] is None:
                zeros = devices.zeros_like(self.params[index].data)
                self.sources[index] = zeros
                self.targets[index] = zeros

    def take_means(self, settings: Settings, group: ProcessGroup) -> None:
        """Write the means over the group's ranks into the targets (collective)."""
        if self.finish is not None:
            self.finish()
            return
        operand = self._operand(settings, group)
        if operand.sources:
            self._backend(group).gradient_sum().allreduce(operand)

    def begin_means(self, settings: Settings, group: ProcessGroup) -> None:
        """Do what needs no other rank before ranks agree; not collective.

        Unless all ranks have begun, ``finish`` must be set to None again.
        """
        algorithm = self._backend(group).made_gradient_sum
        if algorithm is not None:
            self.finish = algorithm.begin(self._operand(settings, group))

    def _backend(self, group: ProcessGroup) -> Backend:
        if self.on_gpu:
            return group.device
        return group.host

    def _operand(self, settings: Settings, group: ProcessGroup) -> Operand:
        """Return what travels, of which nothing is missing."""
        sources = self.sources
        targets = self.targets
        if not all(self.present):
            sources = [source for source in sources if source is not None]
            targets = [target for target in targets if target is not None]
        dtypes = [source.dtype for source in sources]
        is_local = group.host.is_local
        wire_dtypes = wire_dtypes_of(dtypes, settings, is_local, self.on_gpu)
        return Operand(sources, targets, wire_dtypes, group.size)

    def assign(self) -> None:
        """Give parameters the means of gradients that some rank has."""
        if self.targets is self.grads:
            return
        for index, is_present in enumerate(self.present):
            target = self.targets[index]
            if is_present and target is not self.grads[index]:
                self.params[index].grad = target


def bucket_of(
    model: Any, rank: int, zero_fill: bool, settings: Settings, planned: bool = False
) -> Bucket:
    """Return the bucket of the model's present gradients; ``planned`` ones get no targets yet.

    Raises:
        TypeError: a gradient isn't a float array, or is complex and would travel as a
            float.
        MemoryError: a gradient that has to be replaced can't be allocated.
    """
    named = parameters.named(model, rank)
    params = [param for _, param in named]
    grads = [param.grad for param in params]
    if _are_plain(grads):  # nearly always
        likes = grads
        on_gpu = False
        targets = grads
    else:
        grads = [_checked_gradient(name, param, rank) for name, param in named]
        likes = []
        for grad, param in zip(grads, params, strict=True):
            likes.append(param.data if grad is None else grad)
        on_gpu = _on_gpu(likes, rank)
        targets = []
        if not planned:
            targets = _targets(grads, on_gpu)
    specs: list[Spec] = []
    for (name, _), grad, like in zip(named, grads, likes, strict=True):
        if like is None:
            specs.append((name, None, (), False))
        else:
            specs.append((name, like.dtype, like.shape, grad is not None))
    description = _describe(
        tuple(specs), part_entries(named), on_gpu, zero_fill, settings, rank
    )
    return Bucket(params, grads, on_gpu, targets, description)


def _on_gpu(arrays: list[Any], rank: int) -> bool:
    """Return whether the arrays, some of which may be None, are on a GPU."""
    there = [devices.on_gpu(array) for array in arrays if array is not None]
    if len(set(there)) > 1:
        raise TypeError(
            f"rank {rank}: some of the model's arrays are on a GPU and others in host "
            "memory; move the whole model by to_gpu() or to_cpu()"
        )
    return any(there)


def _are_plain(grads: list[Any]) -> bool:
    """Return whether all are NumPy's real floats, in memory of their own that is writeable."""
    return all(
        [
            type(grad) is np.ndarray
            and grad.dtype.kind == "f"
            and grad.flags.num & OWN_MEMORY == OWN_MEMORY
            for grad in grads
        ]
    ) and len(set(map(id, grads))) == len(grads)


def common_entries(zero_fill: bool, settings: Settings) -> list[tuple[Any, ...]]:
    """Return the entries of a signature that concern all gradients."""
    return [
        ("zero_fill", zero_fill),
        ("allreduce_grad_dtype", str(settings.allreduce_grad_dtype)),
        ("chunk_bytes", settings.chunk_bytes),
    ]


# A training loop repeats the same few buckets, and a description takes as long as the sum
# of a small model's gradients.
@lru_cache(maxsize=64)
def _describe(
    specs: tuple[Spec, ...],
    parts: tuple[Any, ...],
    on_gpu: bool,
    zero_fill: bool,
    settings: Settings,
    rank: int,
) -> Description:
    """Return the description of gradients; raise TypeError if one can't travel."""
    wire = settings.allreduce_grad_dtype
    entries: list[tuple[Any, ...]] = list(parts)
    missing = []
    nbytes = 0
    for name, dtype, shape, is_present in specs:
        if dtype is None:
            entries.append(("parameter", name, NOT_INITIALISED))
            continue
        if wire is not None and dtype.kind == "c":
            raise TypeError(
                f"rank {rank}: parameter {name} is complex, and would lose its imaginary part "
                f"as {wire}; set allreduce_grad_dtype to None"
            )
        words = []
        if on_gpu:
            words.append("on a GPU")
        if is_present:
            nbytes += math.prod(shape) * dtype.itemsize
        else:
            missing.append(name)
            if not zero_fill:
                words.append("no gradient")
        entries.append(("parameter", name, str(dtype), shape, *words))
    common = common_entries(zero_fill, settings)
    digest = digest_of([*common, *entries])
    return Description(entries, digest, digest_of(missing), nbytes)


def _checked_gradient(name: str, param: Any, rank: int) -> Any:
    """Return the gradient, or None without gradient or data; raise if it has no floats."""
    if param.data is None:
        return None
    given = param.grad
    grad = parameters.checked(given, name, rank)
    if grad is not given:  # it was a NumPy scalar, and the mean needs an array
        param.grad = grad
    return grad


def wire_dtypes_of(
    dtypes: Sequence[np.dtype], settings: Settings, is_local: bool, on_gpu: bool
) -> tuple[np.dtype, ...]:
    """Return the dtypes in which gradients of these dtypes travel.

    With ``is_local``, gradients in host memory go through no network, so they travel in
    no narrower dtype than their own. In host memory a gradient as wide as the wire dtype
    is not cast: float16 as bfloat16 and back can overflow, and bfloat16 as float16 even
    more often.
    """
    wire = settings.allreduce_grad_dtype
    if wire is None:
        return tuple(dtypes)
    if on_gpu:
        return (wire,) * len(dtypes)
    found = []
    for dtype in dtypes:
        is_wider = dtype.itemsize > wire.itemsize
        stays = dtype.itemsize == wire.itemsize or (is_wider and is_local)
        if not stays:
            dtype = wire
        found.append(dtype)
    return tuple(found)


def _targets(grads: list[Any], on_gpu: bool) -> list[Any]:
    """Return the gradients, with a new array in place of each that can't be overwritten.

    Chainer makes gradients that are read-only, have stride 0, are transposed, or are
    shared between parameters. A missing gradient has no target.
    """
    owners = [_owner(grad, on_gpu) for grad in grads]
    counts = Counter(owners)
    targets = []
    for grad, owner in zip(grads, owners, strict=True):
        has_own_memory = (
            owner is not None and counts[owner] == 1 and UNKNOWN not in counts
        )
        # All arrays of CuPy are writeable.
        if grad is not None and not (
            has_own_memory and (on_gpu or grad.flags.writeable)
        ):
            grad = devices.empty_like(grad)
        targets.append(grad)
    return targets


def _owner(grad: Any, on_gpu: bool) -> int | None:
    """Return a number for the gradient's memory: gradients that share memory have the same.

    None if there is no gradient, or if it isn't C-contiguous and so is copied before
    any gradient is overwritten.
    """
    if grad is None or not grad.flags.c_contiguous:
        return None
    if on_gpu:
        return int(grad.data.mem.ptr)
    memory = grad
    if grad.base is not None:
        memory = grad.base
    if isinstance(memory, np.ndarray) and memory.flags.owndata:
        return id(memory)
    return UNKNOWN
