"""Sums on a circulant graph, for many ranks: right, the same bits everywhere, in few rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from chainermn_comm.sums.circulant import rounds_of
from tests.support.oracles.samples import same
from tests.support.worlds.circulant import (
    by_circulant,
    is_chosen_for,
    mean_by_messages,
)

DTYPES = ("float32", "complex64", "int8", "uint64", "bool")
# Fewer numbers than ranks, one more, and some chunks.
SIZES = (1, 2, 3, 4, 5, 6, 257, 4099)


@pytest.mark.world
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("chunk_bytes", [64, 4096, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_that_of_numpy(world, dtype, chunk_bytes):
    """Of whole numbers, whose sums are exact, wrap, or are a logical or."""
    rows = [
        [(np.arange(size) % 100 + 7 * rank).astype(dtype) for size in SIZES]
        for rank in range(world.size)
    ]
    found = rows[world.rank]
    expected = [
        np.array(terms).sum(0, dtype=dtype) for terms in zip(*rows, strict=True)
    ]
    with by_circulant():
        mean_by_messages(world, found, 1, chunk_bytes)
    for array, numbers in zip(found, expected, strict=True):
        same(array, numbers)


@pytest.mark.parametrize("ranks", [*range(1, 70), 127, 128, 129, 1000, 1023, 1024])
def test_all_blocks_but_one_are_sent_in_as_few_rounds_as_can_be(ranks):
    rounds = rounds_of(ranks)
    assert len(rounds) == math.ceil(math.log2(ranks))
    found = sum(held - skip for skip, held in rounds)
    assert found == ranks - 1
    # Each term comes to each block once: offsets that a rank's partial sums cover.
    covers = {0}
    for skip, _ in rounds:
        covers |= {offset + skip for offset in covers if offset + skip < ranks}
    assert covers == set(range(ranks))


@pytest.mark.parametrize("size", [2, 16, 17, 1000])
def test_from_17_ranks_on_sums_go_in_rounds(size):
    assert is_chosen_for(size) == (size > 16)
