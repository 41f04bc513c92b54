"""A model's parameters, each once, even if several paths lead to it."""

from __future__ import annotations

from typing import Any

from ..slots import named_parameters
from .divided_model import divisions_of


class ParameterSet:
    """The parameters that a model had at one time, in the order of their names.

    To a communicator the set looks like a model.

    Attributes:
        target: the model.
        params: its parameters.
        uninitialized: the parameters that had no values at that time.
        parts: names and parameters of which this rank holds only a part.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self._named = named_parameters(target)
        self.params = [param for _, param in self._named]
        self.uninitialized = [it for it in self.params if not it.is_initialized]
        self.parts = [each for each in self._named if divisions_of(each[1])]
        # In the order of links, so that two links that were swapped are noticed. Their
        # ids wouldn't do, since a copy of this set has parameters of its own.
        self._walk = list(target.params())

    def namedparams(self) -> list[tuple[str, Any]]:
        return self._named

    def has_new_values(self) -> bool:
        """Return whether a parameter was initialised since."""
        return any([param.is_initialized for param in self.uninitialized])

    def is_still_of(self, target: Any) -> bool:
        """Return whether the model has the same parameters, and none was initialised since."""
        are_same = list(map(id, self._walk)) == list(map(id, target.params()))
        return are_same and not self.has_new_values()
