"""The base class of wrappers, which have the attributes of the wrapped object."""

from __future__ import annotations

from typing import Any


class AttributeProxy:
    """Reads and sets the attributes of a wrapped object, except those of ``_OWN``."""

    _OWN = frozenset({"actual"})
    # The wrapped object; a subclass that names another attribute sets it itself.
    _ACTUAL = "actual"

    def __init__(self, actual: Any) -> None:
        self.actual = actual

    def __getattr__(self, name: str) -> Any:
        # One of the wrapper's own attributes is missing only while the wrapper is being copied.
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(getattr(self, self._ACTUAL), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(getattr(self, self._ACTUAL), name, value)
