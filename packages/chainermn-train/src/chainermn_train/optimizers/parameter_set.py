"""A model's parameters, each once, whatever paths lead to it."""

from __future__ import annotations

import operator
from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_together, values_of_first_holders


class ParameterSet:
    """The parameters that a model had at one time, in the order of their names.

    A parameter that two links share has the first of its names. It is a model for a
    communicator.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        # References are kept, not ids: a new parameter may be given the id of one that
        # was deleted.
        self._walk = list(target.params())
        by_id: dict[int, tuple[str, Any]] = {}
        for name, param in sorted(target.namedparams(), key=operator.itemgetter(0)):
            by_id.setdefault(id(param), (name, param))
        self._named = list(by_id.values())
        self.params = [param for _, param in self._named]
        # With their names, those of which other ranks hold the rest.
        self.parts = [each for each in self._named if _is_part(each[1])]
        self._uninitialized = [
            param for param in self._walk if not param.is_initialized
        ]
        self.has_uninitialized = len(self._uninitialized) > 0  # then

    def namedparams(self) -> list[tuple[str, Any]]:
        return self._named

    def has_parameters_of(self, target: Any) -> bool:
        """Return whether the model has the same parameters, initialised or not."""
        params, walk = list(target.params()), self._walk
        return len(walk) == len(params) and all(map(operator.is_, walk, params))

    def is_still_of(self, target: Any) -> bool:
        """Return whether the model has the same parameters, and none was initialised since."""
        since = [param for param in self._uninitialized if param.is_initialized]
        return self.has_parameters_of(target) and not since


def _is_part(param: Any) -> bool:
    """Return whether ranks hold different elements of a parameter, or not all have it."""
    return any(each.kind != "replica" for each in getattr(param, "shardings", ()))


def initialize_missing(communicator: CommunicatorBase, model: Any) -> None:
    """Initialise parameters whose shapes only ranks that had examples know (collective)."""
    operation, named = "initialising parameters", dict(model.namedparams())
    known = {name for name, param in named.items() if param.is_initialized}
    shapes = values_of_first_holders(
        communicator, operation, known, lambda name: named[name].shape
    )
    with raise_together(communicator.handshake, operation):
        for name in (named.keys() & shapes.keys()) - known:
            named[name].initialize(shapes[name])
