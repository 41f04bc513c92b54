"""The settings of a communicator."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .environment import text_of
from .numbers import as_integer
from .watchdog import Timeout

# The names that `create_communicator` knows; `communicators.py`, which starts MPI, has a
# function for each.
NAMES = (
    "naive",
    "flat",
    "hierarchical",
    "two_dimensional",
    "single_node",
    "non_cuda_aware",
    "pure_nccl",
    "dummy",
)

_WIRE_DTYPES = ("float16", "float32", "float64")

CHUNK_VARIABLE = "CHAINERMN_CHUNK_BYTES"
# Chunks start at multiples of a cache line; a message's bytes fit in MPI's int.
CHUNK_STEP = 64
CHUNK_MAXIMUM = 1 << 30


# Settings are compared by identity, by which caches find facts about them fastest.
@dataclass(frozen=True, eq=False)
class Settings:
    """The settings of a communicator, as its user chose them."""

    # The dtype in which gradients travel; None for each gradient's own.
    allreduce_grad_dtype: np.dtype | None = None
    # Accepted for old scripts, without effect.
    batched_copy: bool = False
    # The size of the chunks in which gradients travel; None for each algorithm's
    # default.
    chunk_bytes: int | None = None
    # Whether the bits of a mean depend neither on the topology nor on the name.
    reproducible: bool = False
    # How long a call may wait.
    timeout: Timeout = field(default_factory=lambda: Timeout(0.0))
    # The folder for traces; None if calls aren't traced.
    trace: str | None = None

    def changed(self, name: str, value: Any) -> Settings:
        """Return these settings with one change; raise ValueError if it is impossible."""
        if name not in _CHECKS:
            raise ValueError(
                f"no setting {name!r} can be changed; there are {', '.join(_CHECKS)}, and "
                f"create_communicator takes {', '.join(_FIXED)}"
            )
        return replace(self, **{name: _CHECKS[name](value)})

    def as_dict(self) -> dict[str, Any]:
        """Return the settings that `get_config` shows, by name."""
        return {name: getattr(self, name) for name in (*_CHECKS, *_FIXED)}


def wire_dtype(value: Any) -> np.dtype | None:
    """Return the dtype with this name; raise ValueError if gradients can't travel in it."""
    if value is None:
        return None
    if isinstance(value, str) and value == "bfloat16":
        # NumPy knows this name once ml_dtypes has been imported.
        try:
            value = importlib.import_module("ml_dtypes").bfloat16
        except ImportError:
            raise ValueError(
                "allreduce_grad_dtype 'bfloat16' needs a bfloat16 for NumPy: install ml_dtypes"
            ) from None
    with contextlib.suppress(TypeError):
        dtype: np.dtype = np.dtype(value)
        if dtype.name in (*_WIRE_DTYPES, "bfloat16"):
            return dtype
    known = f"None, {', '.join(_WIRE_DTYPES)} or a bfloat16"
    raise ValueError(f"allreduce_grad_dtype must be {known}, got {value!r}")


def checked_switch(name: str, value: Any) -> bool:
    """Return the value as a bool; raise ValueError unless it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


_SIZES = f"a number of bytes, a multiple of {CHUNK_STEP} from {CHUNK_STEP} to {CHUNK_MAXIMUM}"


def chunk_bytes(value: Any) -> int | None:
    """Return the size of chunks; raise ValueError if there can be none of that size.

    None stands for each algorithm's default.
    """
    if value is None:
        return None
    number = as_integer(value)
    if (
        number is None
        or number % CHUNK_STEP
        or not CHUNK_STEP <= number <= CHUNK_MAXIMUM
    ):
        raise ValueError(f"chunk_bytes must be {_SIZES}, got {value!r}")
    return number


def chunk_bytes_from_env() -> int | None:
    """Return the size of chunks that the environment sets, or None."""
    text = text_of(CHUNK_VARIABLE)
    if not text:
        return None
    try:
        return chunk_bytes(int(text))
    except ValueError:
        raise ValueError(
            f"{CHUNK_VARIABLE} must be {_SIZES}, got {text!r}; unset it for the default"
        ) from None


# The settings that users may change, each with the function that checks a value.
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "allreduce_grad_dtype": wire_dtype,
    "batched_copy": bool,
    "chunk_bytes": chunk_bytes,
}
# The settings that users choose for good when they make the communicator.
_FIXED = ("reproducible",)
