"""The extension that averages a model's persistent values, such as running means, over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import chainer
import numpy as np
from chainer import training
from chainer.backends import cuda

from chainermn_comm import CommunicatorBase, RankMismatchError

from ..collective_errors import allgather_checked, require_communicator
from ..host_arrays import to_host
from ..slots import Slot, persistent_slots


class _Form(NamedTuple):
    """The type of a float, scalar or array."""

    dtype: np.dtype
    shape: tuple[int, ...]


class AllreducePersistent(training.Extension):
    """Replaces each persistent float of a model by its mean over ranks.

    It is meant for the running mean and variance of
    :class:`~chainer.links.BatchNormalization`. Each rank has its own; their mean stands
    for more examples. Calling it before the model is stored or evaluated is enough: by
    default it runs once an epoch, before extensions of ``PRIORITY_WRITER`` such as
    evaluators.

    Floats of every width, as arrays on the host or a GPU or as scalars, are averaged in
    float32 or wider. Arrays are changed in place.
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
        slots: dict[str, Slot] = {}

        def forms() -> dict[str, Any]:
            slots.update((slot.name, slot) for slot in persistent_slots(self.model))
            return {name: _form_of(slot.get()) for name, slot in slots.items()}

        views = allgather_checked(self.comm, "AllreducePersistent", forms)
        floats = _floats_of(views)
        for name, form in floats.items():
            value = to_host(slots[name].get())
            if value is None:
                value = np.zeros(form.shape)
            wide = np.result_type(np.float32, form.dtype)
            mean = self.comm.multi_node_mean(np.asarray(value, wide))
            holders = sum(view[name] is not None for view in views)
            if holders < self.comm.size:  # the others gave zeros
                mean = mean * (self.comm.size / holders)
            _set_mean(slots[name], mean.astype(form.dtype))


def _form_of(value: Any) -> _Form | str | None:
    """Return the form of a float, None for None, and the type's name of anything else."""
    if value is None:
        return None
    if isinstance(value, float):
        value = np.float64(value)
    kinds: Any = (np.generic, *chainer.get_array_types())
    if not isinstance(value, kinds):
        return type(value).__name__
    if value.dtype.kind != "f":
        return str(value.dtype)
    return _Form(value.dtype, value.shape)


def _floats_of(views: list[dict[str, Any]]) -> dict[str, _Form]:
    """Return the forms of the floats, by name, which all ranks must have or have as None."""
    floats: dict[str, _Form] = {}
    for name in sorted({name for view in views for name in view}):
        forms = [view.get(name, "missing") for view in views]
        of_floats = [form for form in forms if isinstance(form, _Form)]
        if not of_floats:
            continue
        floats[name] = of_floats[0]
        if any(form not in (None, of_floats[0]) for form in forms):
            views_in_words = [
                f"{_in_words(form)} on rank {rank}" for rank, form in enumerate(forms)
            ]
            raise RankMismatchError(
                f"persistent value {name!r} has no mean, because it differs between ranks: "
                f"{', '.join(views_in_words)}; build the same model on all ranks"
            )
    return floats


def _in_words(form: Any) -> str:
    return (
        f"{form.dtype} of shape {form.shape}" if isinstance(form, _Form) else str(form)
    )


def _set_mean(slot: Slot, mean: np.ndarray) -> None:
    """Make ``mean`` the value: in the same array where there is one that can be written."""
    value = slot.get()
    if isinstance(value, cuda.ndarray):
        value[...] = cuda.cupy.asarray(mean)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        value[...] = mean
    elif isinstance(value, float | np.generic):
        slot.set(type(value)(mean))
    else:
        slot.set(mean)
