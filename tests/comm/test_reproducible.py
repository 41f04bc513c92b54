"""`reproducible=True`: bits follow from the ranks' numbers, over any topology and by any name."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache, partial, reduce
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.oracles.drawn_models import DTYPES, digest, models, take_mean
from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import Model, Param, finish, with_grads
from tests.support.worlds.topologies import IMPOSED, NAMES, on_nodes

pytestmark = pytest.mark.world

reproducible = partial(on_nodes, reproducible=True)
MODELS = models([(263_001,), (520, 510)], 60)


def cases(size: int) -> list[tuple[str, tuple[int, ...]]]:
    """Every name over every topology on which it can be."""
    return [
        (name, nodes)
        for name, nodes in product(NAMES, IMPOSED[size])
        if name != "single_node" or len(set(nodes)) == 1
    ]


@cache
def communicator(name: str, nodes: tuple[int, ...]) -> Any:
    """Kept for the whole run."""
    return reproducible(nodes, name)


def differing(comm: Any, found: dict[Any, str]) -> set[Any]:
    """What hasn't, on all ranks, the bits of the first (collective)."""
    views = comm.allgather_obj(found)
    first = next(iter(views[0].values()))
    return {case for view in views for case in view if view[case] != first}


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.full)])
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.ranks(2, 4)
def test_any_model_has_the_same_bits_over_all_topologies_and_by_all_names(
    world, examples
):
    @settings(max_examples=examples)
    @given(MODELS, st.sampled_from([None, *DTYPES]), st.booleans())
    def check(entries, wire, zero_fill):
        found = {}
        for case in cases(world.size):
            comm = communicator(*case)
            comm.set_config("allreduce_grad_dtype", wire)
            found[case] = digest(take_mean(comm, entries, zero_fill))
        assert not differing(comm, found)

    check()


def orders_differ(rank: int) -> np.ndarray:
    """Numbers whose sum depends on the order of ranks."""
    random = np.random.default_rng(rank)
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
                np.testing.assert_array_equal(model["w"].grad, mean)
                np.testing.assert_array_equal(comm.multi_node_mean(own), mean)
                np.testing.assert_array_equal(comm.allreduce(own), total)


# Small and large ones, and of dtypes that share a wire dtype.
ARRAYS = {
    "a": (7, "f4"),
    "b": (300_001, "f4"),
    "c": (1, "f8"),
    "d": (900, "f2"),
    "e": (40_000, "f8"),
    "f": (50, "f4"),
    "g": (51, "f4"),
}


def buckets_of(rank: int, division: Iterable[Iterable[str]]) -> list[Model]:
    """Gradients of very different sizes, which go together as the division says."""
    random = np.random.default_rng(rank)
    model = Model()
    for place, (name, (size, dtype)) in enumerate(ARRAYS.items()):
        # In 16 bits the largest number of those that travel together decides what
        # becomes of the smallest; from 2048 on it is another dtype.
        grad = random.standard_normal(size) * 10.0 ** random.uniform(-15, 0, size)
        grad[::1000] *= 10.0**place
        model.params[name] = Param(np.zeros(size, dtype), grad.astype(dtype))
    return [Model(**{name: model[name] for name in names}) for names in division]


def bits(buckets: list[Model]) -> str:
    params: dict[str, Param] = {}
    for bucket in buckets:
        params |= bucket.params
    return digest([params[name].grad for name in ARRAYS])


DIVISIONS = {
    "one": [list(ARRAYS)],
    "each": [[name] for name in reversed(ARRAYS)],
    "few": [["b", "f"], ["e", "d", "a"], ["c", "g"]],
}


@pytest.mark.ci
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("wire", [None, *DTYPES])
def test_neither_buckets_nor_chunks_nor_nodes_change_bits(world, wire):
    """Whether gradients come as one list, in buckets, or planned, through another communicator."""
    found = {}
    for nodes, chunk_bytes in product((1, world.size), (None, 4096)):
        with (
            reproducible(
                [rank % nodes for rank in range(world.size)], allreduce_grad_dtype=wire
            ) as comm,
            comm.split(0, comm.rank) as through,
        ):
            comm.set_config("chunk_bytes", chunk_bytes)
            through.set_config("chunk_bytes", chunk_bytes)
            for how, division in DIVISIONS.items():
                buckets = buckets_of(world.rank, division)
                finish(comm.make_reducer(), *buckets)
                found[nodes, chunk_bytes, how] = bits(buckets)

                buckets = buckets_of(world.rank, division)
                reducer = comm.make_reducer(channel=through)
                works = [reducer.add_planned(bucket) for bucket in buckets]
                for work in works:
                    work.wait()
                reducer.agree()
                for work in works:
                    work.assign()
                found[nodes, chunk_bytes, how, "planned"] = bits(buckets)
    assert not differing(communicator("flat", (0,) * world.size), found)
