"""The norm of gradients on GPUs."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import Sharding, create_communicator, global_norm
from tests.support.doubles import gpus
from tests.support.worlds.models import Model, Param

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3), pytest.mark.ranks(2)]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_it_is_that_of_the_same_on_hosts(world, gpu, dtype):
    with create_communicator("flat") as comm:
        shard = (np.arange(12) + 12 * comm.rank).astype(dtype)
        grads = {"shard": shard, "turned": shard.reshape(3, 4).T, "none": None}
        norms = []
        for put in (gpus.put, np.array):
            params = {
                name: Param(put(shard), None if grad is None else put(grad))
                for name, grad in grads.items()
            }
            for param in params.values():
                param.shardings = (Sharding("shard", comm),)
            norms.append(global_norm(comm, Model(**params)))
    assert norms[0] == norms[1] > 0
