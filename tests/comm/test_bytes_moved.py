"""The bytes that a rank moves for a mean do not grow with the number of ranks: they are counted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.comm.counted_bytes import counted
from tests.support.worlds.models import with_grads

pytestmark = pytest.mark.world

MANY_RANKS = (2, 3, 4, 5, 6, 8)
# The first takes the algorithm of all of them.
OTHERS = ("two_dimensional", "single_node", "non_cuda_aware")
ON_ONE_NODE = [
    "hierarchical",
    *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS),
]
# Each rank's entry in a handshake: not the gradients' bytes.
OVERHEAD = 4096


@pytest.mark.sizes(*MANY_RANKS)
@pytest.mark.parametrize("name", ["naive", "flat", *ON_ONE_NODE])
def test_large_gradients_are_moved_at_most_four_times_on_any_number_of_ranks(
    world, name
):
    sizes = [(1 << 18) + extra for extra in range(6)]
    nbytes = np.dtype("f4").itemsize * sum(sizes)
    with counted(name, world) as (comm, counts):
        for _ in range(2):  # the first tries the memory out
            counts.reset()
            grads = {f"p{size}": np.ones(size, "f4") for size in sizes}
            comm.allreduce_grad(with_grads(**grads))
    assert nbytes <= counts.moved <= 4 * nbytes + OVERHEAD
    assert (counts.sent + counts.received > nbytes) == (name in ("naive", "flat"))
