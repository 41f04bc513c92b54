"""Sums, maxima and minima of users' arrays: `allreduce` and `reduce_scatter`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from chainermn_comm import CommunicatorBase, RankMismatchError, create_communicator
from tests.support.oracles.raised import raises_on_all
from tests.support.oracles.samples import DTYPES, same, sample
from tests.support.worlds.circulant import by_circulant, no_sums_by_messages
from tests.support.worlds.models import with_grads
from tests.support.worlds.third_party import PlainCommunicator

pytestmark = pytest.mark.world
OPERATIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
# Below and above what ranks gather whole, a shard, and a chunk of shared memory.
SIZES = (0, 1, 4096, 300_000)
extremes = pytest.mark.parametrize("op", ["max", "min"])
# What a third party's communicator inherits must say and do the same.
ours_and_inherited = pytest.mark.parametrize(
    "kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]
)


def drawn(rank: int, size: int, dtype: Any) -> np.ndarray:
    numbers = np.random.default_rng([rank, size]).standard_normal(size) * 50
    return numbers.astype(dtype)


@extremes
@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "int8", "uint64", "bool"]
)
def test_extremes_are_numpys(comm, op, dtype):
    for size in SIZES:
        rows = [drawn(rank, size, dtype) for rank in range(comm.size)]
        mine = rows[comm.rank].copy()
        found = comm.allreduce(mine, op=op)
        same(found, reduce(OPERATIONS[op], rows))
        same(mine, rows[comm.rank])
        found[...] = 0  # memory of our own
        same(mine, rows[comm.rank])


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_class_of_its_own_may_take_op_from_the_base_class(world, op):
    comm = PlainCommunicator(world)
    for size in SIZES:
        rows = [drawn(rank, size, "f4") for rank in range(comm.size)]
        found = CommunicatorBase.allreduce(comm, rows[comm.rank], op)
        same(found, reduce(OPERATIONS[op], rows))
        same(comm.allreduce(rows[comm.rank], op), found)


@extremes
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("way", ["pairwise", "in rounds"])
def test_an_extreme_with_a_nan_is_nan(world, op, dtype, way):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    with by_circulant() if way == "in rounds" else nullcontext():
        comm = create_communicator("naive")
    with comm:
        for size in (8, 100_000):
            rows = [drawn(rank, size, dtype) for rank in range(comm.size)]
            rows[-1][3], rows[0][-1], rows[0][4] = np.nan, np.nan, -np.inf
            found = comm.allreduce(rows[comm.rank], op)
            with np.errstate(invalid="ignore"):  # which ml_dtypes warns of
                expected = reduce(OPERATIONS[op], rows)
            np.testing.assert_array_equal(found.astype("f8"), expected.astype("f8"))
            assert np.isnan(found[[3, -1]].astype("f8")).all()


def test_what_travels_in_rounds_is_the_same(world):
    with by_circulant(), create_communicator("naive") as comm:
        rows = [drawn(rank, 300_000, "i4") for rank in range(comm.size)]
        for op, of in OPERATIONS.items():
            same(comm.allreduce(rows[comm.rank], op), reduce(of, rows))
            same(
                comm.reduce_scatter(rows, op),
                rows[comm.rank] * (comm.size if op == "sum" else 1),
            )


@ours_and_inherited
def test_a_rank_gets_the_sum_of_what_all_have_for_it(comm, kind):
    for dtype in DTYPES:
        for op in OPERATIONS if np.dtype(dtype).kind != "c" else ("sum",):
            mine = [sample(comm.rank + 2 * to, dtype) for to in range(comm.size)]
            theirs = [sample(rank + 2 * comm.rank, dtype) for rank in range(comm.size)]
            expected = reduce(OPERATIONS[op], theirs[1:], theirs[0])
            same(kind(comm).reduce_scatter(comm, mine, op), expected)


@ours_and_inherited
def test_what_ranks_get_may_differ_in_shape_and_dtype(comm, kind):
    def given(rank: int, to: int) -> np.ndarray:
        shape = [(), (3, 0), (700, 1000), (5,)][to % 4]
        return np.array(
            drawn(rank, int(np.prod(shape)), ["f4", "f8", "i2"][to % 3])
        ).reshape(shape)

    me, size = comm.rank, comm.size
    mine = tuple(given(me, to) for to in range(size))
    found = kind(comm).reduce_scatter(comm, mine)
    expected = reduce(np.add, [given(rank, me) for rank in range(size)])
    same(np.asarray(found), np.asarray(expected))
    assert not np.shares_memory(found, mine[me])


def test_16_bits_are_summed_in_32(naive):
    rows = [
        np.array([2048.0, 1.0, 0.5], "f2")[rank % 3 : rank % 3 + 1] for rank in range(3)
    ]
    mine = [rows[naive.rank % 3]] * naive.size
    expected = sum(float(rows[rank % 3][0]) for rank in range(naive.size))
    same(naive.reduce_scatter(mine), np.array([expected], "f2"))


@pytest.mark.sizes(2, 3)
@ours_and_inherited
def test_sums_of_which_ranks_disagree_are_mismatched(naive, kind):
    wrong, base = naive.rank == 1, kind(naive)
    fine = [np.ones(2)] * naive.size
    op = "max" if wrong else "min"
    with pytest.raises(RankMismatchError, match="op"):
        base.reduce_scatter(naive, fine, op)
    with pytest.raises(RankMismatchError, match="op"):
        base.allreduce(naive, fine[0], op)
    with pytest.raises(RankMismatchError, match=r"\(3,\)"):
        base.reduce_scatter(naive, [np.ones(3 if wrong else 2)] * naive.size)
    same(base.reduce_scatter(naive, fine), np.full(2, float(naive.size)))


def test_arrays_of_other_packages_on_gpus_are_refused_with_a_remedy(naive):
    class Foreign:
        __cuda_array_interface__: dict = {}  # noqa: RUF012

    for call in (naive.allreduce, naive.allgather):
        with pytest.raises(TypeError, match=r"of GPU arrays only CuPy's .* convert it"):
            call(Foreign())


def test_a_structured_array_takes_no_mean(naive):
    fields = np.zeros(3, [("a", "f4"), ("b", "i4")])
    with pytest.raises(ValueError, match="recvbuf of multi_node_mean must be"):
        naive.multi_node_mean(np.ones(3, "f4"), fields)
    assert not fields["b"].any()


@pytest.mark.sizes(2, 3)
def test_a_result_that_cannot_be_written_is_this_ranks_error_alone(world):
    """The sums have been taken: no rank waits, and the communicator can be used on."""
    with create_communicator("hierarchical") as comm:
        out = np.zeros(3, "f2" if comm.rank == 1 else "f8")
        with (
            np.errstate(all="raise"),
            pytest.raises(FloatingPointError) if comm.rank == 1 else nullcontext(),
        ):
            comm.multi_node_mean(np.full(3, 1e30), out)
        same(comm.allreduce(np.ones(2)), np.full(2, float(comm.size)))


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("reproducible", [False, True])
def test_within_a_machine_sums_take_no_messages(world, reproducible):
    with create_communicator("hierarchical", reproducible=reproducible) as comm:
        rows = [drawn(rank, 30_000, "f4") for rank in range(comm.size)]
        comm.allreduce(rows[comm.rank])  # its first use
        with no_sums_by_messages():
            same(comm.allreduce(rows[comm.rank]), reduce(np.add, rows))
            same(
                comm.multi_node_mean(rows[comm.rank]), reduce(np.add, rows) / comm.size
            )


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("backwards", [False, True])
def test_two_means_under_way_at_a_time_do_not_mix(world, backwards):
    with create_communicator("hierarchical") as comm:
        comm.allreduce_grad(with_grads(w=np.ones(1000, "f4")))
        for elements in (10, 300_000):
            models = [
                with_grads(w=np.full(elements, comm.rank + 10 * n, "f4"))
                for n in range(2)
            ]
            reducers = [comm.make_reducer() for _ in models]
            for reducer, model in zip(reducers, models, strict=True):
                reducer.add(model)
            for reducer in reversed(reducers) if backwards else reducers:
                reducer.agree()
                work = reducer.start()
                work.wait()
                work.assign()
            for number, model in enumerate(models):
                expected = (comm.size - 1) / 2 + 10 * number
                same(model["w"].grad, np.full(elements, expected, "f4"))


@pytest.mark.sizes(2, 3, 4)
def test_a_sum_between_the_steps_of_a_mean_mixes_with_nothing(world):
    with create_communicator("hierarchical") as comm:
        comm.allreduce_grad(with_grads(w=np.ones(1000, "f4")))
        for elements in (10, 300_000, 2_000_000):
            reducer = comm.make_reducer()
            model = with_grads(w=np.full(elements, comm.rank, "f4"))
            reducer.add(model)
            with pytest.raises(RankMismatchError):
                comm.allreduce(np.ones(2 + comm.rank))
            with raises_on_all(comm.rank == 1, TypeError):
                comm.allreduce(np.array(["a"]) if comm.rank == 1 else np.ones(700))
            same(comm.allreduce(np.full(500, 2.0)), np.full(500, 2.0 * comm.size))
            reducer.agree()
            same(comm.allreduce(np.full(5, 1.0)), np.full(5, 1.0 * comm.size))
            work = reducer.start()
            work.wait()
            work.assign()
            same(model["w"].grad, np.full(elements, (comm.size - 1) / 2, "f4"))
