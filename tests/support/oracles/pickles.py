"""Objects that can't be pickled, or not be unpickled."""

from __future__ import annotations

from typing import Any


class Awkward:
    """Cannot be pickled ("there"), or not be unpickled ("here")."""

    def __init__(self, where: str = "here") -> None:
        self.where = where

    def __reduce__(self) -> Any:
        if self.where == "there":
            raise ValueError("does not travel")
        return fail_to_load, ()


def fail_to_load() -> None:
    raise ValueError("does not arrive")
