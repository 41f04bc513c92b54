"""Ranks that compare all of their state in each update, in place of a slice of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chainermn_train.optimizers import drift


@pytest.fixture(autouse=True)
def all_compared() -> Iterator[None]:
    """The detector of drift takes one turn an update."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "MOST_SLICES", 1)
        yield
