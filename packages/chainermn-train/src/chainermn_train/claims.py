"""Which checkpointer of this process writes which files: two would lose one another's."""

from __future__ import annotations

import gc
import os
from typing import Any
from weakref import WeakValueDictionary

from .generations import Generations

_owners: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()


def claim(owner: Any, generations: Generations) -> None:
    """Let ``owner`` alone write a run's files in a folder, until it releases them or is gone.

    Raises:
        ValueError: another one does.
    """
    if taken_by_another(owner, generations):
        gc.collect()  # it may be held by nothing but an exception that is over
    if taken_by_another(owner, generations):
        raise ValueError(
            f"another checkpointer of this process saves as {generations.name!r} in "
            f"{generations.folder}: use that one, or give this one another name or folder"
        )
    _owners[_key(generations)] = owner


def taken_by_another(owner: Any, generations: Generations) -> bool:
    """Whether somebody else in this process writes there."""
    return _owners.get(_key(generations), owner) is not owner


def release(owner: Any) -> None:
    """Let others write what ``owner`` wrote."""
    for key in [key for key, each in _owners.items() if each is owner]:
        del _owners[key]


def _key(generations: Generations) -> tuple[str, str]:
    return os.path.realpath(generations.folder), generations.name
