"""What must be equal on all ranks before gradients move: names, dtypes, shapes, and which exist."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

NOT_INITIALISED = "not initialised (bcast_data would bring it)"


@dataclass(frozen=True)
class GradientSignature:
    """The gradients of one call as one rank sees them, in the order of their parameters' names.

    Attributes:
        settings: names and values that concern all gradients.
        names: the parameters' names, sorted.
        dtypes: of the gradients, or of the parameters that have none; None where a parameter is
            not initialised.
        shapes: likewise.
        annotations: what else must be equal for each parameter, in words; empty where there is
            nothing for any.
    """

    settings: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]
    dtypes: tuple[np.dtype | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    annotations: tuple[tuple[str, ...], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Needed in every call, and slow for many parameters.
        return hash((self.settings, self.names, self.dtypes, self.shapes, self.annotations))

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(
            dtype.itemsize * math.prod(shape)
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
            if dtype is not None and shape is not None
        )

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the entries of a handshake's signature, by which a mismatch is reported."""
        yield from self.settings
        annotations = self.annotations or ((),) * len(self.names)
        for name, dtype, shape, rest in zip(
            self.names, self.dtypes, self.shapes, annotations, strict=True
        ):
            if dtype is None:
                yield ("parameter", name, NOT_INITIALISED, *rest)
            else:
                yield ("parameter", name, dtype, shape, *rest)
