"""`reproducible=True` on GPUs: one way for all names, over any topology, with the bits of CPUs."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from numpy.random import default_rng

from tests.support.doubles.gpus import NCCL, STAGED, means_of
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import IMPOSED, on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(3, 4)]


def arrays(rank):
    """Of which sums in other orders have other bits."""
    random = default_rng(rank)
    shapes = ((700,), (3, 5), (), (0,), (20_001,))
    return [
        np.asarray(
            random.standard_normal(shape) * 10.0 ** random.integers(-3, 3), dtype
        )
        for shape, dtype in product(shapes, ("f4", "f8", "f2"))
    ]


def bits(means):
    return [mean.tobytes() for mean in means]


@pytest.mark.ci
@pytest.mark.parametrize("wire", [None, "float16", "float64"])
def test_bits_are_the_same_over_all_topologies_and_by_all_names(world, gpu, wire):
    own = arrays(world.rank)
    found = {}
    how = {"allreduce_grad_dtype": wire, "reproducible": True}
    for name, nodes in product((*STAGED, *NCCL), IMPOSED[world.size]):
        if name != "single_node" or len(set(nodes)) == 1:
            with on_nodes(nodes, name, **how) as comm:
                found[name, nodes] = bits(means_of(comm, own))
    if wire != "float16":  # whose exponents depend on chunks
        for name in STAGED:
            with on_nodes((0,) * world.size, name, allreduce_grad_dtype=wire) as comm:
                found[name, "by default"] = bits(means_of(comm, own))
    assert len(found) > len(NCCL) * len(IMPOSED[world.size])
    first = next(iter(found.values()))
    assert [case for case in found if found[case] != first] == []
    assert world.allgather(first) == [first] * world.size
    with on_nodes((0,) * world.size, **how) as comm:  # on CPUs
        model = with_grads(**{f"p{i:03}": array for i, array in enumerate(own)})
        comm.allreduce_grad(model)
        assert bits([param.grad for param in model.params.values()]) == first
