"""The settings of a communicator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

_WIRE_DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Settings:
    """What a communicator's user chose.

    Attributes:
        allreduce_grad_dtype: in which gradients travel; None for each one's own.
        batched_copy: accepted for old scripts and without effect: copies are always batched
            where that helps.
    """

    allreduce_grad_dtype: np.dtype | None = None
    batched_copy: bool = False

    def changed(self, name: str, value: Any) -> Settings:
        """These settings with one changed.

        Raises:
            ValueError: there is no such setting, or it can't have this value.
        """
        if name == "allreduce_grad_dtype":
            return replace(self, allreduce_grad_dtype=wire_dtype(value))
        if name == "batched_copy":
            return replace(self, batched_copy=bool(value))
        raise ValueError(f"no setting {name!r}; there are {', '.join(self.as_dict())}")

    def as_dict(self) -> dict[str, Any]:
        """The settings by name."""
        return {
            "allreduce_grad_dtype": self.allreduce_grad_dtype,
            "batched_copy": self.batched_copy,
        }


def wire_dtype(value: Any) -> np.dtype | None:
    """The dtype that ``allreduce_grad_dtype`` names, None for None.

    Raises:
        ValueError: it names none in which gradients can travel.
    """
    if value is None:
        return None
    try:
        dtype = np.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or (dtype.name not in _WIRE_DTYPES and dtype.name != "bfloat16"):
        raise ValueError(
            f"allreduce_grad_dtype must be None, {', '.join(_WIRE_DTYPES)} or a bfloat16, "
            f"got {value!r}"
        )
    return dtype
