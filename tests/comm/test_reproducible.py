"""`reproducible=True`: bits follow from the ranks' numbers, over any topology and by any name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from tests.support.oracles.drawn_models import (
    DTYPES,
    check_model,
    gradients,
    has,
    models,
)
from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import Model, Param, check_mean, with_grads
from tests.support.worlds.topologies import IMPOSED, NAMES, on_nodes

pytestmark = pytest.mark.world

reproducible = partial(on_nodes, reproducible=True)
MODELS = models([(263_001,), (520, 510)], 60)
# Beside the uneven, the alternating and the plain ones that other tests impose.
MORE = {4: [(0, 1, 1, 0), (0, 1, 1, 1), (0, 0, 1, 2), (0, 1, 1, 2)]}


def cases(size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every name over every topology on which it can be."""
    for name, nodes in product(NAMES, IMPOSED[size] + MORE.get(size, [])):
        if name != "single_node" or len(set(nodes)) == 1:
            yield name, nodes


@cache
def communicator(name: str, nodes: tuple[int, ...]) -> Any:
    """Kept for the whole run."""
    return reproducible(nodes, name)


def digest(grads: Iterable[Any]) -> str:
    return hashlib.sha1(
        b"".join(
            repr(None if g is None else (g.shape, g.tobytes())).encode() for g in grads
        )
    ).hexdigest()


def run(comm: Any, entries: list[Any], zero_fill: bool) -> list[Any]:
    mine = gradients(entries, comm.rank)
    pairs = enumerate(zip(entries, mine, strict=True))
    model = Model(
        **{
            f"p{i:03}": Param(
                np.zeros(e.shape, e.dtype), g if has(e, comm.rank, zero_fill) else None
            )
            for i, (e, g) in pairs
        }
    )
    comm.multi_node_mean_grad(model, zero_fill)
    return [param.grad for param in model.params.values()]


def differing(comm: Any, found: dict[Any, str]) -> set[Any]:
    """What hasn't, on all ranks, the bits of the first (collective)."""
    views = comm.allgather_obj(found)
    first = next(iter(views[0].values()))
    return {case for view in views for case, mine in view.items() if mine != first}


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
            found[case] = digest(run(comm, entries, zero_fill))
        assert len(found) >= 5
        assert not differing(comm, found)
        # And it is the mean.
        check_model(
            comm, lambda: run(comm, entries, zero_fill), entries, wire, zero_fill
        )

    check()


def orders_differ(rank: int, dtype: str = "f4") -> np.ndarray:
    """Numbers whose sum depends on the order of ranks."""
    random = np.random.default_rng(rank)
    numbers = random.standard_normal(3000) * 10.0 ** random.integers(-6, 6, 3000)
    return numbers.astype(dtype)


def sum_in_order(rows: list[np.ndarray]) -> np.ndarray:
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


@pytest.mark.sizes(3, 4)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_sums_and_means_are_in_the_order_of_ranks(world, dtype):
    rows = [orders_differ(rank, dtype) for rank in range(world.size)]
    total = sum_in_order(rows)
    mean = total / rows[0].dtype.type(world.size)
    own = rows[world.rank]
    for case in cases(world.size):
        comm = communicator(*case)
        comm.set_config("allreduce_grad_dtype", None)
        comm.allreduce_grad(model := with_grads(w=own.copy()))
        np.testing.assert_array_equal(model["w"].grad, mean)
        np.testing.assert_array_equal(comm.multi_node_mean(own), mean)
        np.testing.assert_array_equal(comm.allreduce(own), total)


@pytest.mark.sizes(3, 4)
@pytest.mark.ranks(4)
def test_many_ranks_are_summed_in_their_order_too(world):
    """Where others are by circulant."""
    rows = [orders_differ(rank) for rank in range(world.size)]
    mean = sum_in_order(rows) / np.float32(world.size)
    with by_circulant():
        for name, nodes in cases(world.size):
            with reproducible(nodes, name) as comm:
                comm.allreduce_grad(model := with_grads(w=rows[world.rank].copy()))
                np.testing.assert_array_equal(model["w"].grad, mean)
                np.testing.assert_array_equal(
                    comm.multi_node_mean(rows[world.rank]), mean
                )
        with on_nodes((0,) * world.size, "flat") as comm:
            assert not np.array_equal(comm.multi_node_mean(rows[world.rank]), mean)


@pytest.mark.sizes(3, 4)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("wire", [None, "float16"])
def test_without_it_bits_differ(world, wire):
    """Else the tests above would tell nothing."""
    every = [("flat", (0,) * world.size), ("hierarchical", (0,) * world.size)]
    every += [
        ("hierarchical", nodes) for nodes in IMPOSED[world.size] if len(set(nodes)) > 1
    ]
    found = {}
    for name, nodes in every:
        with on_nodes(nodes, name, allreduce_grad_dtype=wire) as comm:
            model = with_grads(w=orders_differ(world.rank) / 1e4)
            comm.allreduce_grad(model)
            found[name, nodes] = digest([model["w"].grad])
    assert len(set(found.values())) > 1


# Small and large ones, and of dtypes that share a wire dtype.
ARRAYS = {
    "a": (7, "f4"),
    "b": (300_001, "f4"),
    "c": (1, "f8"),
    "d": (900, "f2"),
    "e": (40_000, "f8"),
}
ARRAYS |= {f"s{i}": (50 + i, "f4") for i in range(9)}


def buckets_of(rank: int, division: Iterable[Iterable[str]]) -> list[Model]:
    """Gradients of very different sizes, which go together as the division says."""
    params = {}
    for place, (name, (size, dtype)) in enumerate(ARRAYS.items()):
        random = np.random.default_rng([rank, place])
        # In 16 bits the largest number of those that travel together decides what
        # becomes of the smallest; from 2048 on it is another dtype.
        grad = random.standard_normal(size) * 10.0 ** random.uniform(-15, 0, size)
        grad[::1000] *= 10.0 ** (place % 6)
        params[name] = Param(np.zeros(size, dtype), grad.astype(dtype))
    return [Model(**{name: params[name] for name in names}) for names in division]


def bits(buckets: list[Model]) -> str:
    params = {
        name: param for bucket in buckets for name, param in bucket.params.items()
    }
    return digest(params[name].grad for name in ARRAYS)


DIVISIONS = {
    "one": [list(ARRAYS)],
    "each": [[name] for name in reversed(ARRAYS)],
    "few": [
        ["b", "s1", "s2"],
        ["e", "d", "a"],
        ["c", *(f"s{i}" for i in (0, 3, 4, 5, 6, 7, 8))],
    ],
}


@pytest.mark.ci
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("wire", [None, *DTYPES])
def test_neither_buckets_nor_chunks_nor_nodes_change_bits(world, wire):
    """Whether gradients come as one list, in buckets, or planned, through another communicator."""
    found = {}
    places = ((0,) * world.size, tuple(range(world.size)))
    for nodes, chunk_bytes, (how, division) in product(
        places, (None, 4096), DIVISIONS.items()
    ):
        with (
            reproducible(nodes, allreduce_grad_dtype=wire) as comm,
            comm.split(0, comm.rank) as through,
        ):
            comm.set_config("chunk_bytes", chunk_bytes)
            through.set_config("chunk_bytes", chunk_bytes)
            for planned in (False, True):
                buckets = buckets_of(world.rank, division)
                reducer = comm.make_reducer(channel=through if planned else None)
                for bucket in buckets:
                    reducer.add(bucket, planned)
                if not planned:
                    reducer.agree()
                work = reducer.start(planned=len(buckets) if planned else 0)
                work.wait()
                if planned:
                    reducer.agree()
                work.assign()
                found[nodes, chunk_bytes, how, planned] = bits(buckets)
    assert not differing(communicator("flat", (0,) * world.size), found)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_agree_on_it(world):
    with pytest.raises(
        RankMismatchError, match=r"reproducible: True on rank 0; False on rank"
    ):
        create_communicator("flat", reproducible=world.rank == 0)
    told = ValueError if world.rank == 0 else PeerError
    with pytest.raises(told, match="reproducible must be True or False, got 'yes'"):
        create_communicator("flat", reproducible="yes" if world.rank == 0 else True)


def test_it_is_shown_and_stays():
    with create_communicator("naive") as comm:
        assert comm.get_config("reproducible") is False
        with pytest.raises(ValueError, match="create_communicator takes reproducible"):
            comm.set_config("reproducible", True)
    with (
        create_communicator(reproducible=True) as comm,
        comm.split(0, comm.rank) as part,
    ):
        for each in (comm, part):
            assert (
                each.get_config("reproducible")
                is each.get_config()["reproducible"]
                is True
            )
            with pytest.raises(
                ValueError, match="create_communicator takes reproducible"
            ):
                each.set_config("reproducible", False)
            check_mean(each)


@pytest.mark.sizes(2, 3, 4)
def test_names_that_refuse_go_on_refusing(world):
    with pytest.raises(ValueError, match="'single_node' takes ranks of one node"):
        reproducible(range(world.size), "single_node")
    with pytest.raises(ValueError, match="'pure_nccl' is for GPUs"):
        create_communicator("pure_nccl", reproducible=True)
    with create_communicator("dummy", reproducible=True) as comm:
        model = with_grads(w=np.full(3, comm.rank, "f4"))
        comm.allreduce_grad(model)
        np.testing.assert_array_equal(model["w"].grad, comm.rank)
