"""Every algorithm gives the mean over any topology: the same bits on all ranks, and again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.comm.inside import late_ranks
from tests.support.oracles.drawn_models import (
    DTYPES,
    Entry,
    check_model,
    models,
    take_mean,
)
from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import IMPOSED, on_nodes, over_nodes

pytestmark = pytest.mark.world

# The numbers of ranks, in the first tiers, on which a name's algorithm is no other
# name's.
NAMES = {
    "naive": (2,),
    "flat": (1, 2, 3),
    "hierarchical": (2, 3, 4),
    "two_dimensional": (4,),
    "single_node": (),
    "non_cuda_aware": (),
}
MODELS = models([(263_001,), (520, 510)], 60)

# By default, and in the way of many ranks.
Way = Callable[[], AbstractContextManager[object]]
WAYS = [nullcontext, by_circulant]


@cache
def communicator(name, nodes, way, chunk_bytes):
    """Kept for the whole run: chunks go on from call to call."""
    with way():
        comm = on_nodes(nodes, name)
        comm.set_config("chunk_bytes", chunk_bytes)
        comm.allreduce_grad(with_grads(w=np.ones(3, "f4")))  # the algorithm is made
    return comm


FEW = [
    pytest.param(name, 10, marks=pytest.mark.ranks(*ranks))
    for name, ranks in NAMES.items()
    if ranks
]
MANY = [pytest.param(name, 200, marks=pytest.mark.full) for name in NAMES]


@pytest.mark.parametrize(("name", "examples"), FEW + MANY)
def test_any_model_over_any_topology(world, name, examples):
    topologies = [
        n for n in IMPOSED[world.size] if name != "single_node" or len(set(n)) == 1
    ]
    twin = Entry((9,), "float32", "C", frozenset(), 0)
    twins = [twin, replace(twin, layout="shared", missing=frozenset({0}))]

    @settings(max_examples=examples)
    @example(twins, topologies[0], None, True, nullcontext, None)
    @given(
        MODELS,
        st.sampled_from(topologies),
        st.sampled_from([None, *DTYPES]),
        st.booleans(),
        st.sampled_from(WAYS),
        st.sampled_from([None, 8192]),
    )
    def check(entries, nodes, wire, zero_fill, way, chunk_bytes):
        comm = communicator(name, nodes, way, chunk_bytes)
        check_model(
            comm, lambda: take_mean(comm, entries, zero_fill), entries, wire, zero_fill
        )

    check()


# A call takes 0.5 ms with two ranks on two idle cores and 1.5 with three, but 7 with
# four, which take turns in waiting: ten thousand take a minute for each topology.
@over_nodes("hierarchical", "two_dimensional")
@pytest.mark.parametrize(
    ("calls", "likelihood"),
    [(60, 0.05), pytest.param(10_000, 0.002, marks=pytest.mark.full)],
)
def test_back_to_back_with_delays(world, name, nodes, calls, likelihood):
    """Models of 1, 2 and 3 chunks in turn, no barrier of the test's own between calls."""
    chunk_bytes = 1 << 16
    with on_nodes(nodes, name) as comm, late_ranks(world.rank, likelihood):
        comm.set_config("chunk_bytes", chunk_bytes)
        for call in range(calls):
            size = chunk_bytes // np.dtype("f4").itemsize  # a chunk each
            grads = {
                f"p{i}": np.full(size, comm.rank + call + i, "f4")
                for i in range(call % 3 + 1)
            }
            comm.allreduce_grad(model := with_grads(**grads))
            for i, param in enumerate(model.params.values()):
                mean = np.float32(call + i + (comm.size - 1) / 2)
                assert (param.grad == mean).all()
