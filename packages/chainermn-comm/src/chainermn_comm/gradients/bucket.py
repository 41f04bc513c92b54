"""One rank's gradients in a bucket: what must be equal on all ranks, and what moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..config import Settings
from ..gpu import devices
from ..layout import Operand
from ..messaging import Backend, ProcessGroup, digest_of, dtype_name
from . import parameters

NOT_INITIALISED = "not initialised (bcast_data would bring it)"


@dataclass
class Bucket:
    """One rank's gradients, in the order of the parameters' names."""

    params: list[Any]
    grads: list[Any]  # None where there is none
    # What travels: gradients, and zeros for missing ones that other ranks have; None
    # where nothing travels.
    sources: list[Any]
    # Where the means are to be written; the list `grads` itself if all can be
    # overwritten.
    targets: list[Any]
    # What must be equal on all ranks, as entries of a handshake's signature: settings,
    # and each gradient's name, dtype and shape, those of the parameter if it is missing.
    entries: list[tuple[Any, ...]]
    digest: bytes  # equal where entries are
    nbytes: int  # of the gradients
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
        """Return the operands in host memory and on GPUs, each with the backend that sums it."""
        present = [i for i, each in enumerate(self.sources) if each is not None]
        sources = [self.sources[i] for i in present]
        targets = [self.targets[i] for i in present]
        if self.wire_dtypes:
            operand = Operand(sources, targets, self.wire_dtypes, group.size)
            return [(group.host, operand)]
        found = []
        is_local = group.host.is_local
        is_on_gpu = [devices.on_gpu(grad) for grad in sources]
        for on_gpu, backend in ((False, group.host), (True, group.device)):
            members = [i for i, each in enumerate(is_on_gpu) if each == on_gpu]
            if members:
                chosen = [sources[i] for i in members]
                into = [targets[i] for i in members]
                dtypes = [grad.dtype for grad in chosen]
                wire_dtypes = wire_dtypes_of(dtypes, settings, is_local, on_gpu)
                operand = Operand(chosen, into, wire_dtypes, group.size)
                found.append((backend, operand))
        return found

    def add_zeros(self, present: np.ndarray) -> None:
        """Let zeros travel for gradients that are missing here and ``present`` on some rank."""
        self.wire_dtypes = None
        for index in np.flatnonzero(present):
            data = self.params[index].data
            if self.sources[index] is None and data is not None:
                zeros = devices.zeros_like(data)
                self.sources[index] = zeros
                self.targets[index] = zeros

    def begin_planned(self) -> None:
        """Let all gradients travel, with zeros for what is missing, and the means to new arrays.

        On a GPU the current stream waits for the gradients.
        """
        if self.ready is not None:
            devices.current_stream().wait_event(self.ready)
        self.targets = [devices.empty_like(param.data) for param in self.params]
        self.add_zeros(np.ones(len(self.params), bool))

    def assign(self, present: np.ndarray | None) -> None:
        """Give parameters their means; ``present``, if given, says which some rank has."""
        if self.targets is self.grads:
            return
        for index, target in enumerate(self.targets):
            param = self.params[index]
            is_mean = self.sources[index] is not None
            if self.planned and self.grads[index] is None:
                is_mean = present is not None and bool(present[index])
            if is_mean and param.grad is not target:
                param.grad = target


@dataclass
class Described:
    """What follows from the names, dtypes and shapes of gradients."""

    entries: list[tuple[Any, ...]]
    wire_dtypes: Sequence[np.dtype] | None

    def __post_init__(self) -> None:
        self.digest = digest_of(self.entries)


# By settings, names and specs, for arrays of NumPy's. A step of a small model takes a
# millisecond, of which describing its gradients anew would be two percent.
_known: dict[Any, Described] = {}
MOST_KNOWN = 256


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
    named = parameters.named(model, rank)
    params = [param for _, param in named]
    grads = [param.grad for param in params]
    key = None
    if all([type(grad) is np.ndarray for grad in grads]):  # nearly always
        names = tuple([name for name, _ in named])
        specs = tuple([(grad.dtype, grad.shape) for grad in grads])
        key = (settings, zero_fill, is_local, names, specs)
    known = _known.get(key)
    if known is None:
        grads = [_checked_gradient(name, param, rank) for name, param in named]
        known = _describe(named, grads, rank, zero_fill, settings, is_local)
        if key is not None:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[key] = known
    present = [grad for grad in grads if grad is not None]
    targets: list[Any] = []
    if not planned:
        targets = _targets(grads, present)
    return Bucket(
        params=params,
        grads=grads,
        sources=list(grads),
        targets=targets,
        entries=known.entries,
        digest=known.digest,
        nbytes=sum([grad.nbytes for grad in present]),
        complete=len(present) == len(grads),
        wire_dtypes=known.wire_dtypes,
        planned=planned,
    )


def _checked_gradient(name: str, param: Any, rank: int) -> Any:
    """Return the gradient; None if it or the data is missing; raise if it is no float."""
    if param.data is None:
        return None
    given = param.grad
    grad = parameters.checked(given, name, rank)
    if grad is not given:  # a NumPy scalar: the mean needs an array to go to
        param.grad = grad
    return grad


def _describe(
    named: list[tuple[str, Any]],
    grads: list[Any],
    rank: int,
    zero_fill: bool,
    settings: Settings,
    is_local: bool,
) -> Described:
    """Describe gradients, which may be missing, on a GPU, or complex."""
    wire = settings.allreduce_grad_dtype
    entries: list[tuple[Any, ...]] = [
        ("zero_fill", zero_fill),
        ("allreduce_grad_dtype", str(wire)),
        ("chunk_bytes", settings.chunk_bytes),
    ]
    for (name, param), grad in zip(named, grads, strict=True):
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
        if devices.on_gpu(like):
            words.append("on a GPU")
        if grad is None and not zero_fill:
            words.append("no gradient")
        entries.append(("parameter", name, dtype_name(like.dtype), like.shape, *words))
    present = [grad for grad in grads if grad is not None]
    wire_dtypes = None
    if all([type(grad) is np.ndarray for grad in present]):
        dtypes = [grad.dtype for grad in present]
        wire_dtypes = wire_dtypes_of(dtypes, settings, is_local)
    return Described(entries, wire_dtypes)


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
    found = []
    for dtype in dtypes:
        is_wider = dtype.itemsize > wire.itemsize
        stays = dtype.itemsize == wire.itemsize or (is_wider and is_local)
        if not stays:
            dtype = wire
        found.append(dtype)
    return tuple(found)


def _targets(grads: list[Any], present: list[Any]) -> list[Any]:
    """Return the gradients, with a new array in place of each that can't be written to."""
    usable = parameters.own_memory(present)
    if all(usable) and len(present) == len(grads):
        return grads
    can_be_overwritten = iter(usable)
    targets = []
    for grad in grads:
        if grad is not None and not next(can_be_overwritten):
            grad = devices.empty_like(grad)
        targets.append(grad)
    return targets
