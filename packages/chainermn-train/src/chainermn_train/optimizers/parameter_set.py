"""A model's parameters, each once, whatever paths lead to it."""

from __future__ import annotations

import operator
from typing import Any

from ..slots import named_parameters


class ParameterSet:
    """The parameters that a model had at one time, in the order of their names.

    It is a model for a communicator.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        # References are kept, not ids: a new parameter may be given the id of one that
        # was deleted.
        self._walk = list(target.params())
        self._named = named_parameters(target)
        self.params = [param for _, param in self._named]
        # With their names, those of which other ranks hold the rest.
        self.parts = [each for each in self._named if _is_part(each[1])]
        self._uninitialized = [
            param for param in self._walk if not param.is_initialized
        ]

    def namedparams(self) -> list[tuple[str, Any]]:
        return self._named

    def has_new_values(self) -> bool:
        """Return whether a parameter was initialised since."""
        return any([param.is_initialized for param in self._uninitialized])

    def is_still_of(self, target: Any) -> bool:
        """Return whether the model has the same parameters, and none was initialised since."""
        params = list(target.params())
        walk = self._walk
        are_same = len(walk) == len(params) and all(map(operator.is_, walk, params))
        return are_same and not self.has_new_values()


def _is_part(param: Any) -> bool:
    """Return whether ranks hold different elements of a parameter, or not all have it."""
    return any(each.kind != "replica" for each in getattr(param, "shardings", ()))
