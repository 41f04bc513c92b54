"""Base classes of wrappers: attributes of the wrapped object, copies that share a communicator."""

from __future__ import annotations

import copy
from typing import Any, NoReturn


class UnpicklableMixin:
    """Copies of an instance, shallow or deep, share its communicator; pickling raises TypeError."""

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = copy.copy(self)
        vars(twin).update(copy.deepcopy(vars(twin), memo))
        return twin

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be pickled, because it holds a communicator, which "
            "belongs to this process; save and load its state with chainer.serializers, or "
            "pickle it before it is made multi-node"
        )


class AttributeProxy:
    """Read, set and delete the attributes of a wrapped object, except those of ``_OWN``."""

    _OWN: frozenset[str] = frozenset({"actual"})
    # The wrapped object; a subclass that names another attribute sets it itself.
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
