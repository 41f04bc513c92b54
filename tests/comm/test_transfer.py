"""Broadcasts in parts, by messages from each rank to each other."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm.messaging import transfer

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


def pattern(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 1001])
def test_every_rank_gets_roots_bytes(world, monkeypatch, size):
    monkeypatch.setattr(transfer, "MAX_MESSAGE_BYTES", 100)
    for root in range(world.size):
        buffer = pattern(size, root if world.rank == root else 100 + world.rank)
        transfer.bcast_in_parts(world, buffer, root, 5)
        assert np.array_equal(buffer, pattern(size, root))
