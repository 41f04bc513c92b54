"""Every verb, for arrays on hosts, on GPUs or on both, gives what NumPy says, wherever ranks are.

And what NCCL can take of GPUs' touches no host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest

from tests.support.doubles import gpus
from tests.support.oracles.samples import DTYPES, LAYOUTS
from tests.support.oracles.verbs import check
from tests.support.worlds.topologies import IMPOSED, on_nodes

pytestmark = [pytest.mark.world, pytest.mark.ranks(1, 2, 3, 4)]

BY_NCCL = ("hierarchical", "two_dimensional", "pure_nccl")
CASES = [
    *product(
        ["no GPU"], ["here"], ["naive", "flat", "hierarchical", "two_dimensional"]
    ),
    ("double", "here and there", "naive"),
    *product(["double"], ["here and there", "there and here"], ["hierarchical"]),
    *product(["double"], ["there"], ["naive", *BY_NCCL]),
    *(
        pytest.param("device", where, name, marks=pytest.mark.gpu)
        for where, name in product(
            ["here and there", "there"], ["naive", "hierarchical"]
        )
    ),
]
# The other names and topologies take the same ways through memory.
FEW = [("float32", "C")]
EVERY = [
    *((dtype, "C") for dtype in (*DTYPES, "uint16", "uint32")),
    *(("float32", layout) for layout in (*LAYOUTS[1:], "large")),
]
# Whether arrays of even and of odd ranks lie on GPUs.
WHERE = {
    "here": (False, False),
    "here and there": (False, True),
    "there and here": (True, False),
    "there": (True, True),
}


@pytest.fixture
def gpu(request: pytest.FixtureRequest, world: Any) -> Iterator[Any]:
    kind = request.param
    with nullcontext() if kind == "no GPU" else gpus.of_kind(kind, world) as device:
        yield device


@pytest.mark.ci
@pytest.mark.parametrize(("gpu", "where", "name"), CASES, indirect=["gpu"])
def test_every_verb_gives_what_numpy_says(world, request, gpu, where, name):
    # Four ranks share two cores: there, few kinds of arrays in the first tiers.
    every = EVERY if world.size < 4 or request.config.getoption("--full") else FEW
    there = [WHERE[where][rank % 2] for rank in range(world.size)]
    one_node, *others = IMPOSED[world.size]
    if name in ("naive", "flat") or isinstance(gpu, gpus.Real):
        others = []  # which don't look at nodes, or take seconds to connect
    for nodes in (one_node, *others):
        with on_nodes(nodes, name) as comm:
            double = None
            if where == "there" and name in BY_NCCL and not isinstance(gpu, gpus.Real):
                comm.allreduce(gpus.put_sample(0))  # NCCL connects
                double = gpu
            all_ways = nodes == one_node and name in ("naive", "hierarchical")
            with gpus.small_buffers():
                check(comm, there, every if all_ways else FEW, double)
