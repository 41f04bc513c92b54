"""A model's persistent values, such as running means."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from chainermn_comm import CommunicatorBase

from .collective_errors import raise_together, values_of_first_holders
from .host_arrays import to_host


class Persistent(NamedTuple):
    """A persistent value and its place."""

    link: Any
    attribute: str
    name: str  # with the path of the link
    value: Any


def persistents(model: Any) -> list[Persistent]:
    """Return the persistent values of a model and its links."""
    # Chainer has no public name for the set; 7.8.1 is its last release but for repairs.
    return [
        Persistent(
            link, attribute, f"{path.rstrip('/')}/{attribute}", getattr(link, attribute)
        )
        for path, link in model.namedlinks()
        for attribute in link._persistent
    ]


def broadcast_persistents(communicator: CommunicatorBase, model: Any) -> None:
    """Give rank 0's values to all ranks; where rank 0 has None, the first other one (collective).

    A link learns the shapes of its statistics from its first examples, as its
    parameters'. A rank that has had none gets the parameters from others; without the
    statistics, a lazy :class:`~chainer.links.BatchNormalization` would begin anew
    later, and its parameters with it.
    """
    operation, here = (
        "broadcast of persistent values",
        {it.name: it for it in persistents(model)},
    )
    held = {name for name, each in here.items() if each.value is not None}
    values = values_of_first_holders(
        communicator, operation, held, lambda name: to_host(here[name].value)
    )
    with raise_together(communicator.handshake, operation):
        for name in here.keys() & values.keys():
            (link, attribute, *_), value = here[name], values[name]
            is_array = isinstance(value, np.ndarray)
            setattr(link, attribute, link.device.send(value) if is_array else value)
