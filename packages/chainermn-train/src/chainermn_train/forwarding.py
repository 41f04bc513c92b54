"""Lets an object be used like the optimizer that it holds."""

from __future__ import annotations

from typing import Any


class ForwardsToOptimizer:
    """Attributes but its own are those of ``actual_optimizer``, to read, set and delete."""

    _OWN: frozenset[str] = frozenset({"actual_optimizer"})

    def __getattr__(self, name: str) -> Any:
        # An own attribute is missing only while the object is being copied.
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.actual_optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.actual_optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._OWN:
            raise AttributeError(f"{name!r} of a multi-node optimizer can't be deleted")
        delattr(self.actual_optimizer, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.actual_optimizer)})
