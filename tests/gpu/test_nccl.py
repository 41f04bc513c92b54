"""NCCL's communicator itself: its operations, also for a rank alone."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import CommunicationError
from chainermn_comm.gpu.nccl import NcclCommunicator
from tests.support.doubles import gpus
from tests.support.doubles.nccl_double import NcclError

pytestmark = [pytest.mark.world, pytest.mark.ranks(1, 2, 3)]


@pytest.fixture
def nccl(world, one_each):
    made = NcclCommunicator(world)
    yield made
    made.close()


@pytest.mark.parametrize("shards", ["one", "all"])
def test_sums_of_shards_and_their_way_to_all_ranks(world, nccl, shards):
    count = 1 if shards == "one" else world.size
    buffer = gpus.put(np.full(4 * count, world.rank + 1, "f8"))
    nccl.reduce_shards(buffer, count)
    if world.rank < count:
        own = gpus.to_host(buffer)[4 * world.rank : 4 * world.rank + 4]
        np.testing.assert_array_equal(own, sum(range(world.size + 1)))
    nccl.gather_shards(buffer, count)
    np.testing.assert_array_equal(gpus.to_host(buffer), sum(range(world.size + 1)))


def test_after_an_abort_it_says_so_and_closes(world, nccl):
    nccl.abort()
    with pytest.raises(CommunicationError, match="NCCL was aborted, or closed"):
        nccl.sum_in_place(gpus.put(np.ones(2, "f4")))
    nccl.check()


@pytest.mark.sizes(2, 3)
def test_a_group_is_ended_where_a_call_in_it_fails(world, double):
    """Else all that follows would be taken for a part of it."""
    nccl = NcclCommunicator(world)
    buffer = gpus.put(np.full(4, world.rank, "f4"))
    double.plant("reduce", NcclError("NCCL_ERROR_INVALID_ARGUMENT: it failed"))
    with pytest.raises(NcclError, match="INVALID_ARGUMENT"):
        nccl.reduce_shards(buffer, 1)
    nccl.sum_in_place(buffer)
    np.testing.assert_array_equal(gpus.to_host(buffer), sum(range(world.size)))
    nccl.close()
