"""Cases in which each pair of values of any two parameters occurs, and not each combination."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
from allpairspy import AllPairs


def pairwise(**axes: Iterable[Any]) -> Callable[[Any], Any]:
    """Parametrize a test by all pairs of values: `@pairwise(dtype=DTYPES, layout=LAYOUTS, ...)`.

    For parameters that don't interact, or only in pairs; the rest of the product runs
    in the full tier, where each case that is left out here carries the marker `full`.
    """
    return pytest.mark.parametrize(list(axes), pairs(*axes.values()))


def pairs(*axes: Iterable[Any]) -> list[Any]:
    """The cases of `pairwise`."""
    values = [list(axis) for axis in axes]
    chosen = {tuple(case) for case in AllPairs(values)}
    return [
        pytest.param(*case, marks=[] if case in chosen else pytest.mark.full)
        for case in product(*values)
    ]


def in_full(*cases) -> list[Any]:
    """Cases for `parametrize` that only the full tier has; a tuple is one of several arguments."""
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.full) for case in every]


def tiered(default: Iterable[tuple[Any, ...]], *axes: Iterable[Any]) -> list[Any]:
    """These cases, and in the full tier those of the product of the axes that are left."""
    chosen = list(default)
    return [*chosen, *in_full(*(case for case in product(*axes) if case not in chosen))]
