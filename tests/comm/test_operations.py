"""Sums, maxima and minima of users' arrays: `allreduce` and `reduce_scatter`."""

from __future__ import annotations

from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from numpy.random import default_rng

from chainermn_comm import CommunicatorBase, RankMismatchError, create_communicator
from tests.support.oracles.raised import raises_on_all
from tests.support.oracles.samples import same
from tests.support.worlds.circulant import by_circulant, no_sums_by_messages
from tests.support.worlds.models import check_mean, finish, with_grads

pytestmark = pytest.mark.world
OPERATIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
# Below and above what ranks gather whole, a shard, and a chunk of shared memory.
SIZES = (0, 1, 4096, 300_000)
# What a third party's communicator inherits must say and do the same.
ours_and_inherited = pytest.mark.parametrize(
    "kind", [type, lambda _: CommunicatorBase], ids=["ours", "inherited"]
)


def drawn(rank, size, dtype):
    numbers = default_rng([rank, size]).standard_normal(size) * 50
    return numbers.astype(dtype)


def with_nans(rank, size, dtype):
    """Numbers drawn for a rank, of which another one on each is NaN if floats are wanted."""
    numbers = drawn(rank, size, dtype)
    if numbers.dtype.kind not in "ib" and size > 1:
        numbers[rank + 2] = np.nan
    return numbers


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "f8", "i1", "?"])
def test_extremes_are_numpys(comm, op, dtype):
    for size in SIZES:
        rows = [with_nans(rank, size, dtype) for rank in range(comm.size)]
        mine = rows[comm.rank].copy()
        found = comm.allreduce(mine, op=op)
        with np.errstate(invalid="ignore"):  # which ml_dtypes warns of
            expected = reduce(OPERATIONS[op], rows)
        assert found.dtype == expected.dtype
        same(found.astype("f8"), expected.astype("f8"))
        found[...] = 0  # memory of our own
        same(mine.astype("f8"), rows[comm.rank].astype("f8"))


@pytest.mark.parametrize(("op", "dtype"), [("sum", "i4"), ("max", "f2"), ("min", "f4")])
def test_what_travels_in_rounds_is_the_same(world, op, dtype):
    with by_circulant(), create_communicator("naive") as comm:
        rows = [with_nans(rank, 300_000, dtype) for rank in range(comm.size)]
        mine = rows[comm.rank]
        same(comm.allreduce(mine, op), reduce(OPERATIONS[op], rows))
        expected = reduce(OPERATIONS[op], [mine] * comm.size)
        same(comm.reduce_scatter(rows, op), expected)


@ours_and_inherited
def test_what_ranks_get_may_differ_in_shape_and_dtype(comm, kind):
    def given(rank, to):
        large = drawn(rank, 700_000, "f8").reshape(700, 1000)
        small = np.array(drawn(rank, 1, "i2")[0])
        return (large, small, large[:, :0])[to % 3]

    ranks = range(comm.size)
    mine = tuple(given(comm.rank, to) for to in ranks)
    found = kind(comm).reduce_scatter(comm, mine)
    expected = reduce(np.add, [given(rank, comm.rank) for rank in ranks])
    same(np.asarray(found), np.asarray(expected))
    assert not np.shares_memory(found, mine[comm.rank])


@pytest.mark.sizes(3)
def test_16_bits_are_summed_in_32(naive):
    mine = np.array([[2048.0, 1.0, 0.5][naive.rank]], "f2")
    same(naive.reduce_scatter([mine] * 3), np.array([2049.5], "f2"))


def test_a_sum_is_no_product(naive):
    """Of inf + 0j and 1 the imaginary part would be no number."""
    found = naive.allreduce(np.array([complex(np.inf, 0), 1 + 2j]))
    same(found, np.array([complex(np.inf, 0), naive.size * (1 + 2j)]))


def test_arrays_of_other_packages_on_gpus_are_refused_with_a_remedy(naive):
    class Foreign:
        __cuda_array_interface__: dict = {}  # noqa: RUF012

    for call in (naive.allreduce, naive.allgather):
        with pytest.raises(TypeError, match=r"of GPU arrays only CuPy's .* convert it"):
            call(Foreign())


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("reproducible", [False, True])
def test_within_a_machine_sums_take_no_messages(world, reproducible):
    with create_communicator("hierarchical", reproducible=reproducible) as comm:
        comm.allreduce(np.ones(30_000))  # its first use
        with no_sums_by_messages():
            total = comm.allreduce(np.ones(30_000))
            same(total, np.full(30_000, 1.0 * comm.size))


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("elements", [10, 300_000, 2_000_000])
def test_sums_and_means_between_the_steps_of_a_mean_mix_with_nothing(world, elements):
    with create_communicator("hierarchical") as comm:
        check_mean(comm, 1000)
        model = with_grads(w=np.full(elements, comm.rank, "f4"))
        first = comm.make_reducer()
        first.add(model)
        other = with_grads(w=np.full(elements, comm.rank + 10, "f4"))
        second = comm.make_reducer()
        second.add(other)
        with pytest.raises(RankMismatchError):
            comm.allreduce(np.ones(2 + comm.rank))
        mine = 1.0
        if comm.rank == 1:
            mine = "a"
        with raises_on_all(comm.rank == 1, TypeError):
            comm.allreduce(mine)
        finish(second)
        total = comm.allreduce(np.full(5, 1.0))
        same(total, np.full(5, 1.0 * comm.size))
        finish(first)
        mean = (comm.size - 1) / 2
        same(model["w"].grad, np.full(elements, mean, "f4"))
        same(other["w"].grad, np.full(elements, mean + 10, "f4"))
