"""What counts as an integer in a user's argument."""

from __future__ import annotations

import operator
from typing import Any


def as_integer(value: Any) -> int | None:
    """The int that the value stands for, NumPy's included; None if it is no integer.

    True and False are none: where a rank, tag or color is meant, they are mistakes.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
