"""Every verb, for arrays on hosts or on GPUs, gives what NumPy says, wherever ranks are.

And what NCCL can take of GPUs' touches no host memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest

from tests.support.doubles import gpus
from tests.support.oracles.samples import DTYPES, LAYOUTS
from tests.support.oracles.verbs import check
from tests.support.worlds.topologies import IMPOSED, on_nodes

pytestmark = [pytest.mark.world, pytest.mark.ranks(1, 2, 3, 4)]

BY_NCCL = ("hierarchical", "two_dimensional", "pure_nccl")
CASES = [
    *product(["no GPU"], [False], ["naive", "flat", "hierarchical", "two_dimensional"]),
    *product(["double"], [True], ["naive", *BY_NCCL]),
    *(
        pytest.param("device", True, name, marks=pytest.mark.gpu)
        for name in ("naive", "hierarchical")
    ),
]
# The other names and topologies take the same ways through memory.
FEW = [("float32", "C")]
EVERY = [
    *((dtype, "C") for dtype in (*DTYPES, "uint16", "uint32")),
    *(("float32", layout) for layout in (*LAYOUTS[1:], "large")),
]


@pytest.fixture
def gpu(request, world):
    kind = request.param
    with nullcontext() if kind == "no GPU" else gpus.of_kind(kind, world) as device:
        yield device


@pytest.mark.ci
@pytest.mark.parametrize(("gpu", "is_there", "name"), CASES, indirect=["gpu"])
def test_every_verb_gives_what_numpy_says(world, request, gpu, is_there, name):
    # Four ranks share two cores: there, few kinds of arrays in the first tiers.
    every = FEW
    if world.size < 4 or request.config.getoption("--full"):
        every = EVERY
    there = [is_there] * world.size
    one_node, *others = IMPOSED[world.size]
    if name in ("naive", "flat") or isinstance(gpu, gpus.Real):
        others = []  # which don't look at nodes, or take seconds to connect
    for nodes in (one_node, *others):
        with on_nodes(nodes, name) as comm:
            double = None
            if is_there and name in BY_NCCL and not isinstance(gpu, gpus.Real):
                comm.allreduce(gpus.put_sample(0))  # NCCL connects
                double = gpu
            all_ways = nodes == one_node and name in ("naive", "hierarchical")
            with gpus.small_buffers():
                check(comm, there, every if all_ways else FEW, double)
