"""A base for wrappers: what they don't have themselves is that of the object they wrap."""

from __future__ import annotations

from typing import Any


class Forwarding:
    """Reads, sets and deletes attributes of ``actual``, but for those named in ``_OWN``.

    A subclass may give the wrapped object another name, ``_ACTUAL``, and then sets it itself.

    Attributes:
        actual: the object that is wrapped.
    """

    _OWN: frozenset[str] = frozenset({"actual"})
    _ACTUAL = "actual"

    def __init__(self, actual: Any) -> None:
        self.actual = actual

    def __getattr__(self, name: str) -> Any:
        # An own attribute is missing only while the wrapper is being copied.
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(getattr(self, self._ACTUAL), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(getattr(self, self._ACTUAL), name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._OWN:
            raise AttributeError(f"{name!r} of {type(self).__name__} can't be deleted")
        delattr(getattr(self, self._ACTUAL), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(getattr(self, self._ACTUAL))})
