"""Arrays that are the same on all ranks are found, and ranks take turns at them by size."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_train.checkpoint.same_on_all import names_alike

pytestmark = pytest.mark.world


def test_the_largest_array_is_dealt_first(naive):
    state = {name: np.zeros(size) for name, size in (("a", 1), ("b", 3), ("c", 2))}
    assert names_alike(naive, state) == ["b", "c", "a"]
