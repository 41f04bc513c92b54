"""The bytes that a rank moves for a mean do not grow with the number of ranks: they are counted."""

from __future__ import annotations

import numpy as np
import pytest

from tests.comm.counted_bytes import Counts, counted
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
# Arrays of less than 1 MiB, and larger ones.
SHARED = {f"p{i}": 100_003 for i in range(8)}
TINY = {f"p{i:03}": 100 for i in range(700)}
LARGE = {f"p{i}": (1 << 18) + i for i in range(6)}


def counts_of_calls(comm, name, sizes, wire=None, calls=1):
    """What this rank moves in each of some calls, after the first, which tries the memory out."""
    first = {key: np.arange(size, dtype="f4") % 1000 for key, size in sizes.items()}
    found = []
    with counted(name, comm, wire) as (communicator, counts):
        for _ in range(1 + calls):
            model = with_grads(
                **{key: array * (comm.rank + 1) for key, array in first.items()}
            )
            counts.reset()
            communicator.allreduce_grad(model)
            found.append(Counts(**vars(counts)))
            for key, array in first.items():
                np.testing.assert_allclose(
                    model[key].grad, array * (comm.size + 1) / 2, rtol=1e-2
                )
    return found[1:]


def nbytes_of(sizes: dict[str, int]) -> int:
    return sum(sizes.values()) * np.dtype("f4").itemsize


@pytest.mark.sizes(*MANY_RANKS)
@pytest.mark.parametrize("sizes", [SHARED, TINY], ids=["large", "tiny"])
@pytest.mark.parametrize("name", ON_ONE_NODE)
@pytest.mark.parametrize("wire", [None, "float16"])
def test_a_rank_writes_and_reads_shared_memory_a_few_times(world, name, sizes, wire):
    nbytes = nbytes_of(sizes)  # whatever the wire: there is none
    (counts,) = counts_of_calls(world, name, sizes, wire)
    assert counts.sent + counts.received < OVERHEAD
    if world.size == 2:  # packed; and the other's, with what is packed of one's own
        assert counts.written == nbytes
        assert nbytes <= counts.read <= 2 * nbytes
    else:  # packed, and a shard of sums written; a shard of all ranks and all sums read
        assert counts.written == pytest.approx((1 + 1 / world.size) * nbytes, rel=1e-3)
        assert counts.read == pytest.approx(2 * nbytes, rel=1e-3)


@pytest.mark.sizes(*MANY_RANKS)
@pytest.mark.parametrize("name", ["naive", "flat", *ON_ONE_NODE])
def test_large_gradients_are_moved_at_most_four_times_on_any_number_of_ranks(
    world, name
):
    nbytes = nbytes_of(LARGE)
    (counts,) = counts_of_calls(world, name, LARGE)
    assert counts.moved <= 4 * nbytes + OVERHEAD
    assert (counts.sent + counts.received > nbytes) == (name in ("naive", "flat"))
