"""Ranks that compare all of their state in each update, in place of a part of it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from chainermn_train.optimizers import drift


def checksum_of_all(_: Any, params: Sequence[Any], steps: int) -> int:
    """Return the checksum of all parts of these parameters, after so many steps."""
    value = steps
    for part in drift.parts_of(params):
        updates = getattr(part.param.update_rule, "t", 0)
        value = zlib.crc32(part.elements, (value + updates) & 0xFFFFFFFF)
    return value


@pytest.fixture(autouse=True)
def all_compared() -> Iterator[None]:
    """The detector of drift compares all in each update."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift.DriftDetector, "checksum", checksum_of_all)
        yield
