"""`reproducible=True`: bits follow from the ranks' numbers, over any topology and by any name."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial, reduce
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from tests.support.oracles.drawn_models import DTYPES, Entry, digest, model_of, models
from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import Model, finish, with_grads
from tests.support.worlds.topologies import IMPOSED, NAMES, on_nodes

pytestmark = pytest.mark.world

reproducible = partial(on_nodes, reproducible=True)
CHUNK_BYTES = (None, 4096)
MODELS = models([(263_001,), (520, 510)], 60)


def cases(size):
    """Every name over every topology on which it can be."""
    return [
        (name, nodes)
        for name, nodes in product(NAMES, IMPOSED[size])
        if name != "single_node" or len(set(nodes)) == 1
    ]


@cache
def communicator(name, nodes, chunk_bytes):
    """Kept for the whole run."""
    comm = reproducible(nodes, name)
    comm.set_config("chunk_bytes", chunk_bytes)
    return comm


def take_mean(comm, model, zero_fill, in_buckets):
    """The digest of the means of a whole model, or of buckets of one parameter each."""
    if in_buckets:
        buckets = [Model(**{name: it}) for name, it in model.params.items()]
        finish(comm.make_reducer(zero_fill), *buckets)
    else:
        comm.multi_node_mean_grad(model, zero_fill)
    return digest([param.grad for param in model.params.values()])


def differing(comm, found):
    """What hasn't, on all ranks, the bits of the first (collective)."""
    views = comm.allgather_obj(found)
    first = next(iter(views[0].values()))
    return {case for view in views for case in view if view[case] != first}


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.ranks(2, 4)
def test_any_model_has_the_same_bits_by_all_names_over_all_topologies_in_any_pieces(
    world, examples
):
    large = Entry((900,), "float32", "C", frozenset(), exponent=2)
    small = replace(large, exponent=-7)

    @settings(max_examples=examples)
    @example([large, small], "float16", False)  # each has an exponent of its own
    @given(MODELS, st.sampled_from([None, *DTYPES]), st.booleans())
    def check(entries, wire, zero_fill):
        found = {}
        shares_memory = {"shared", "overlapping"} & {it.layout for it in entries}
        for number, case in enumerate(cases(world.size)):
            comm = communicator(*case, CHUNK_BYTES[number % 2])
            comm.set_config("allreduce_grad_dtype", wire)
            model = model_of(entries, world.rank, zero_fill)
            in_buckets = number % 3 == 0 and not shares_memory
            found[case] = take_mean(comm, model, zero_fill, in_buckets)
        assert not differing(comm, found)

    check()


def orders_differ(rank):
    """Numbers whose sum depends on the order of ranks."""
    random = default_rng(rank)
    numbers = random.standard_normal(3000) * 10.0 ** random.integers(-6, 6, 3000)
    return numbers.astype("f4")


@pytest.mark.sizes(3, 4)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", [nullcontext, by_circulant])
def test_sums_and_means_are_in_the_order_of_ranks(world, way):
    rows = [orders_differ(rank) for rank in range(world.size)]
    own = rows[world.rank]
    total = reduce(np.add, rows)
    mean = total / np.float32(world.size)
    with way():
        for name, nodes in cases(world.size):
            with reproducible(nodes, name) as comm:
                comm.allreduce_grad(model := with_grads(w=own.copy()))
                assert_array_equal(model["w"].grad, mean)
                assert_array_equal(comm.multi_node_mean(own), mean)
                assert_array_equal(comm.allreduce(own), total)
