"""ChainerMN's diagnostics: the command ``chainermn`` and its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chainermn_tools.environment import collect, render

__all__ = ["collect", "render"]


def __getattr__(name: str) -> object:
    """Import what is asked for only then: each rank of `chainermn launch` imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from chainermn_tools import environment

    return getattr(environment, name)
