"""One rank's gradients in a bucket: what must be equal on all ranks, and what moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np

from ..config import Settings
from ..gpu import devices
from ..layout import Operand
from ..messaging import ProcessGroup, dtype_name
from . import parameters

NOT_INITIALISED = "not initialised (bcast_data would bring it)"
UNKNOWN = 0  # in place of an owner of memory


@dataclass
class Bucket:
    """One rank's gradients, in the order of the parameters' names."""

    params: list[Any]
    grads: list[Any]  # None where there is none
    # Whether a gradient, or the parameter if it is missing, is on a GPU.
    on_gpu: list[bool]
    # What must be equal on all ranks, as entries of a handshake's signature: each
    # gradient's name, dtype and shape, those of the parameter if it is missing.
    entries: list[tuple[Any, ...]]
    # Where the means are to be written: gradients that can be overwritten, and new
    # arrays. None where nothing travels.
    targets: list[Any]

    def __post_init__(self) -> None:
        # What travels: gradients, and zeros for missing ones.
        self.sources = list(self.grads)
        # Which gradients some rank has; of this rank's own until ranks have compared.
        self.present = [grad is not None for grad in self.grads]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's gradients."""
        return sum([grad.nbytes for grad in self.grads if grad is not None])

    @property
    def arrays_on_gpu(self) -> list[Any]:
        """The arrays of parameters on a GPU."""
        return [param.data for param in compress(self.params, self.on_gpu)]

    def add_zeros(self, wanted: Sequence[bool]) -> None:
        """Let zeros travel for those of the wanted gradients that are missing here."""
        for index, is_wanted in enumerate(wanted):
            if is_wanted and self.sources[index] is None:
                zeros = devices.zeros_like(self.params[index].data)
                self.sources[index] = zeros
                self.targets[index] = zeros

    def take_means(self, settings: Settings, group: ProcessGroup) -> None:
        """Write the means over the group's ranks into the targets (collective)."""
        is_local = group.host.is_local
        for on_gpu in sorted(set(self.on_gpu)):  # the same on all ranks
            backend = group.host
            if on_gpu:
                backend = group.device
            sources = []
            targets = []
            for index, source in enumerate(self.sources):
                if source is not None and self.on_gpu[index] == on_gpu:
                    sources.append(source)
                    targets.append(self.targets[index])
            if sources:
                dtypes = [source.dtype for source in sources]
                wire_dtypes = wire_dtypes_of(dtypes, settings, is_local, on_gpu)
                operand = Operand(sources, targets, wire_dtypes, group.size)
                backend.gradient_sum().allreduce(operand)

    def assign(self) -> None:
        """Give parameters the means of gradients that some rank has."""
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
    grads = [_checked_gradient(name, param, rank) for name, param in named]
    on_gpu = []
    for grad, param in zip(grads, params, strict=True):
        like = param.data if grad is None else grad
        on_gpu.append(type(like) is not np.ndarray and devices.on_gpu(like))
    targets = []
    if not planned:
        targets = _targets(grads, on_gpu)
    return Bucket(
        params=params,
        grads=grads,
        on_gpu=on_gpu,
        entries=_describe(named, grads, on_gpu, rank, zero_fill, settings),
        targets=targets,
    )


def _checked_gradient(name: str, param: Any, rank: int) -> Any:
    """Return the gradient; None if it or the data is missing; raise if it is no float."""
    if param.data is None:
        return None
    given = param.grad
    if type(given) is np.ndarray and given.dtype.kind in "fc":  # nearly always
        return given
    grad = parameters.checked(given, name, rank)
    if grad is not given:  # a NumPy scalar: the mean needs an array to go to
        param.grad = grad
    return grad


def _describe(
    named: list[tuple[str, Any]],
    grads: list[Any],
    on_gpu: list[bool],
    rank: int,
    zero_fill: bool,
    settings: Settings,
) -> list[tuple[Any, ...]]:
    """Return the entries of gradients, which may be missing, on a GPU, or complex."""
    wire = settings.allreduce_grad_dtype
    entries: list[tuple[Any, ...]] = []
    for (name, param), grad, there in zip(named, grads, on_gpu, strict=True):
        like = grad
        if grad is None:
            like = param.data
        if like is None:
            entries.append(("parameter", name, NOT_INITIALISED))
            continue
        if wire is not None and like.dtype.kind == "c":
            raise TypeError(
                f"rank {rank}: parameter {name} is complex, and would lose its imaginary part "
                f"as {wire}; set allreduce_grad_dtype to None"
            )
        words = []
        if there:
            words.append("on a GPU")
        if grad is None and not zero_fill:
            words.append("no gradient")
        entries.append(("parameter", name, dtype_name(like.dtype), like.shape, *words))
    return entries


def wire_dtypes_of(
    dtypes: Sequence[np.dtype], settings: Settings, is_local: bool, on_gpu: bool
) -> tuple[np.dtype, ...]:
    """Return the dtypes in which gradients of these dtypes travel.

    ``is_local`` says whether gradients in host memory go through no network: they
    travel in no narrower dtype than their own. In host memory a gradient as wide as the
    wire dtype is not cast: float16 as bfloat16 and back can overflow, and bfloat16 as
    float16 more so.
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


def _targets(grads: list[Any], on_gpu: list[bool]) -> list[Any]:
    """Return the gradients, with a new array in place of each that can't be overwritten.

    Chainer makes gradients that are read-only, of stride 0, transposed, or shared
    between parameters. Missing ones have no target.
    """
    owners = list(map(_owner, grads, on_gpu))
    counts = Counter(owners)
    targets = []
    for grad, owner, there in zip(grads, owners, on_gpu, strict=True):
        is_apart = owner is not None and counts[owner] == 1 and UNKNOWN not in counts
        # All arrays of CuPy are writeable.
        if grad is not None and not (is_apart and (there or grad.flags.writeable)):
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
