"""An extension that averages a model's persistent values, such as running means, over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer import backend, training

from chainermn_comm import CommunicatorBase, RankMismatchError

from ..collective_errors import allgather_checked, require_communicator
from ..host_arrays import to_host
from ..slots import persistent_slots

# The type of a float, scalar or array: its dtype and shape.
_Form = tuple[str, tuple[int, ...]]


class AllreducePersistent(training.Extension):
    """Replaces each persistent float of a model by its mean over ranks.

    The extension is meant for the running mean and variance of
    :class:`~chainer.links.BatchNormalization`, of which each rank has its own. It needs
    to run only before the model is saved or evaluated: by default it runs once per
    epoch, before extensions of ``PRIORITY_WRITER`` such as evaluators.

    Floats of any width, as scalars or as arrays on the host or a GPU, are averaged in
    float32 or wider. Arrays are changed in place. Other values, such as the integer
    ``BatchNormalization.N``, complex numbers and strings, are left alone. If a value is
    still None on some ranks, because a link has had no examples there, these ranks get
    the mean of the other ranks.

    Calling the extension is collective, so its trigger must fire on all ranks at the
    same time.

    Args:
        model: the :class:`chainer.Link` whose persistent values are averaged.
        comm: the ranks.

    Raises:
        TypeError: ``model`` is no link, or ``comm`` no communicator.
    """

    trigger = (1, "epoch")
    priority = training.PRIORITY_WRITER + 1

    def __init__(self, model: Any, comm: CommunicatorBase) -> None:
        self.comm = require_communicator(comm, "AllreducePersistent")
        if not hasattr(model, "namedlinks"):
            raise TypeError(
                f"AllreducePersistent needs a model, a chainer.Link, not {type(model).__name__}"
            )
        self.model = model

    def __call__(self, trainer: Any = None) -> None:
        """Average the persistent values (collective); ``trainer`` is not used.

        Raises:
            RankMismatchError: on some ranks a persistent float is missing, is no float,
                or has another shape or dtype; raised on all ranks.
        """
        slots = {slot.name: slot for slot in persistent_slots(self.model)}
        views = allgather_checked(
            self.comm,
            "AllreducePersistent",
            lambda: {name: _form_of(slot.get()) for name, slot in slots.items()},
        )
        for name, (dtype, shape) in _floats_of(views).items():
            slot = slots[name]
            value = slot.get()
            own = to_host(value)
            if value is None:
                own = np.zeros(shape)
            wide = np.result_type(np.float32, dtype)
            mean = self.comm.multi_node_mean(np.asarray(own, wide))
            holders = sum(view[name] is not None for view in views)
            # Ranks without a value gave zeros.
            mean = (mean * (self.comm.size / holders)).astype(dtype)
            if value is None:
                slot.set(mean)
            elif isinstance(value, float | np.generic):
                slot.set(type(value)(mean))
            else:
                value[...] = backend.get_array_module(value).asarray(mean)


def _form_of(value: Any) -> _Form | str | None:
    """Return the form of a float, None for None, and the type's name of anything else."""
    if value is None:
        return None
    if isinstance(value, float):
        return "float64", ()
    dtype = getattr(value, "dtype", type(value).__name__)
    if getattr(dtype, "kind", None) != "f":
        return str(dtype)
    return str(dtype), value.shape


def _floats_of(views: list[dict[str, Any]]) -> dict[str, _Form]:
    """Return the forms of the floats, by name; each must be a float or None on all ranks."""
    floats = {}
    for name in sorted({name for view in views for name in view}):
        forms = [view.get(name, "missing") for view in views]
        present = set(forms) - {None}
        if not any(isinstance(form, tuple) for form in present):
            continue
        if len(present) > 1:
            raise RankMismatchError(
                f"persistent value {name!r} has no mean, because it differs between ranks: in "
                f"rank order, it is {forms}; build the same model on all ranks"
            )
        floats[name] = present.pop()
    return floats
