"""The extension that averages a model's persistent values, such as running means, over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer import training
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase, RankMismatchError

from ..collective_errors import allgather_checked, require_communicator
from ..host_arrays import to_host
from ..slots import Slot, persistent_slots
from ..wrappers import UnpicklableMixin


class AllreducePersistent(UnpicklableMixin, training.Extension):
    """Replaces each persistent float of a model by its mean over ranks.

    It is meant for the running mean and variance of
    :class:`~chainer.links.BatchNormalization`. Each rank has its own; their mean stands
    for more examples. Calling it before the model is stored or evaluated is enough: by
    default it runs once an epoch, before extensions of ``PRIORITY_WRITER`` such as
    evaluators.

    Floats of every width, as arrays on the host or a GPU or as scalars, are averaged in
    float32 or wider; all of them travel together. Arrays are changed in place.
    Everything else (integers such as ``BatchNormalization.N``, complex numbers,
    strings) is left alone. A value that is still None on some ranks, as in a link that
    has had no examples there, counts nothing there, and gets the others' mean.

    Calling it is collective: its trigger has to fire on all ranks at the same time.

    Args:
        model: the :class:`chainer.Link` whose persistent values are averaged.
        comm: the ranks.

    Raises:
        TypeError: an argument is not a link or not a communicator.
    """

    trigger = (1, "epoch")
    priority = training.PRIORITY_WRITER + 1

    def __init__(self, model: Any, comm: CommunicatorBase) -> None:
        comm = require_communicator(comm, "AllreducePersistent")
        if not hasattr(model, "namedlinks"):
            raise TypeError(
                f"AllreducePersistent needs a model, a chainer.Link, not {type(model).__name__}"
            )
        self.model = model
        self.comm = comm

    def __call__(self, trainer: Any = None) -> None:
        """Average the persistent values (collective); ``trainer`` is not used.

        Raises:
            RankMismatchError: on all ranks, when a persistent float is missing on some
                of them, or is no float, or has another shape or dtype there.
        """

        def find() -> dict[str, Any]:
            slots = persistent_slots(self.model)
            return {slot.name: _kind_of(slot.get()) for slot in slots}

        kinds, counts = _merge_views(
            allgather_checked(self.comm, "AllreducePersistent", find)
        )
        if not kinds:
            return
        found = {slot.name: slot for slot in persistent_slots(self.model)}
        wide = np.result_type(np.float32, *(dtype for dtype, _ in kinds.values()))
        flat = []
        for name, (_, shape) in kinds.items():
            value = to_host(found[name].get())
            term = np.zeros(shape, wide) if value is None else np.asarray(value, wide)
            flat.append(term.reshape(-1))
        mean = self.comm.multi_node_mean(np.concatenate(flat))
        parts = np.split(mean, np.cumsum([len(each) for each in flat])[:-1])
        for (name, (dtype, shape)), part in zip(kinds.items(), parts, strict=True):
            if counts[name] < self.comm.size:  # those that have none gave zeros
                part = part * (self.comm.size / counts[name])
            _replace(found[name], part.reshape(shape).astype(dtype))


def _kind_of(value: Any) -> tuple[np.dtype, tuple[int, ...]] | str | None:
    """Return dtype and shape of a float, None for None, the type's name of anything else."""
    if value is None:
        return None
    if not isinstance(value, (float, np.ndarray, np.generic, cuda.ndarray)):
        return type(value).__name__
    dtype = getattr(value, "dtype", np.dtype(float))
    return (dtype, np.shape(value)) if dtype.kind == "f" else str(dtype)


def _replace(slot: Slot, mean: np.ndarray) -> None:
    """Make ``mean`` the value: in the same array where there is one that can be written."""
    value = slot.get()
    if isinstance(value, cuda.ndarray):
        value[...] = cuda.to_gpu(mean, device=value.device)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = mean
    elif isinstance(value, (float, np.generic)):
        slot.set(type(value)(mean))
    else:
        slot.set(mean)


def _merge_views(views: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the kinds of the floats, by name, and how many ranks have each."""
    names = sorted({name for view in views for name in view})
    kinds, counts = {}, {}
    for name in names:
        seen = [view.get(name, "missing") for view in views]
        floats = [kind for kind in seen if isinstance(kind, tuple)]
        if not floats:
            continue
        if any(kind is not None and kind != floats[0] for kind in seen):
            raise RankMismatchError(
                f"persistent value {name!r} has no mean, because it differs between ranks: "
                + ", ".join(
                    f"{_in_words(kind)} on rank {rank}"
                    for rank, kind in enumerate(seen)
                )
                + "; build the same model on all ranks"
            )
        kinds[name], counts[name] = floats[0], len(floats)
    return kinds, counts


def _in_words(kind: Any) -> str:
    return f"{kind[0]} of shape {kind[1]}" if isinstance(kind, tuple) else str(kind)
