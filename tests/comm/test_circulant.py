"""Sums on a circulant graph, for many ranks: right, the same bits everywhere, in few rounds."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from chainermn_comm import create_communicator
from chainermn_comm.sums import circulant
from chainermn_comm.sums.circulant import rounds_of
from tests.support.jobs import runner
from tests.support.worlds.circulant import (
    by_circulant,
    is_chosen_for,
    mean_by_messages,
    most_bytes_of_a_sum,
)
from tests.support.worlds.many_ranks import CALLS, wrong_means
from tests.support.worlds.models import check_mean
from tests.support.worlds.topologies import on_nodes, over_nodes

world_tests = pytest.mark.world
FEW = pytest.mark.sizes(2, 3, 4)
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "int8": np.int8,
    "int64": np.int64,
    "bool": np.bool_,
}
# Fewer numbers than ranks, one more, and some chunks.
SIZES = (1, 2, 3, 4, 5, 6, 257, 4099)
CHUNKS = (64, 4096, 1 << 20)


def drawn(rank, size, dtype, scale=50.0):
    rng = np.random.default_rng([rank, size])
    return (rng.standard_normal(size) * scale).astype(dtype)


def summed(world, arrays, divisor=1, chunk_bytes=1 << 20):
    """What all ranks get, checked to be the same bits, also the second time."""
    found = []
    for _ in range(2):
        buffers = [array.copy() for array in arrays]
        with by_circulant():
            mean_by_messages(world, buffers, divisor, chunk_bytes)
        found.append([buffer.tobytes() for buffer in buffers])
    assert found[0] == found[1]
    assert world.allgather(found[0]) == [found[0]] * world.size
    return buffers


@world_tests
@FEW
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_that_of_numpy(world, dtype, chunk_bytes):
    kind = np.dtype(DTYPES[dtype])
    rows = {
        size: [drawn(rank, size, kind) for rank in range(world.size)] for size in SIZES
    }
    divisor = 1 if kind.kind in "biu" else world.size
    found = summed(
        world, [rows[size][world.rank] for size in SIZES], divisor, chunk_bytes
    )
    for size, result in zip(SIZES, found, strict=True):
        if kind.kind in "biu":
            # May wrap, or is a logical or.
            expected = np.array(rows[size]).sum(0, dtype=kind)
            np.testing.assert_array_equal(result, expected)
            continue
        wide = np.array([row.astype(np.complex128) for row in rows[size]])
        # One rounding to the dtype, and some to that in which sums are taken.
        small = float(ml_dtypes.finfo(kind).eps) / 2 * 1.01
        steps = (
            math.ceil(math.log2(world.size)) * 2.0**-24
            if kind.itemsize < 8
            else 2.0**-50
        )
        steps = 2.0**-22 if kind.kind == "c" else steps
        bound = small * abs(wide.mean(0)) + 2 * steps * abs(wide).mean(0)
        assert np.all(abs(result.astype(np.complex128) - wide.mean(0)) <= bound)


@world_tests
@FEW
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_a_mean_that_can_be_represented_does_not_overflow(world, chunk_bytes):
    dtype = np.float16
    largest = np.finfo(dtype).max
    row = np.full(1000, largest, dtype)
    row[::7], row[5::70], row[3], row[13] = 3.0, -largest, np.inf, np.nan
    (found,) = summed(world, [row], world.size, chunk_bytes)
    tolerance = 3 * np.finfo(dtype).eps
    np.testing.assert_allclose(found[:3], row[:3], rtol=tolerance)
    finite = np.isfinite(row)
    # Divided first: what is compared may not overflow, either.
    np.testing.assert_allclose(found[finite] / 4, row[finite] / 4, rtol=tolerance)
    np.testing.assert_array_equal(found[~finite], row[~finite])


@world_tests
@FEW
def test_a_sum_that_can_not_be_represented_is_infinite(world):
    (found,) = summed(world, [np.full(100, 3e38, "f4")])
    np.testing.assert_array_equal(found, np.inf)


@world_tests
@over_nodes("naive", "flat", "hierarchical", "two_dimensional")
@pytest.mark.parametrize(
    ("chunk_bytes", "wire"),
    [(64, "float16"), (8192, None), (8192, "float16"), (None, None)],
)
def test_every_communicator_gives_the_mean(world, name, nodes, chunk_bytes, wire):
    larger = {64: 0, 8192: 3001, None: 280_000}[chunk_bytes]
    with by_circulant(), on_nodes(nodes, name, allreduce_grad_dtype=wire) as comm:
        comm.set_config("chunk_bytes", chunk_bytes)
        wrong = wrong_means(comm, wire, larger)
    assert not wrong


@world_tests
@FEW
def test_arrays_that_users_pass_are_summed_so_too(world):
    with by_circulant(), create_communicator("flat") as comm:
        rows = [drawn(rank, 5000, "f8") for rank in range(comm.size)]
        np.testing.assert_allclose(
            comm.allreduce(rows[comm.rank]), np.sum(rows, 0), rtol=1e-9
        )
        assert comm.allreduce(np.int64(comm.rank)) == sum(range(comm.size))
        mean = comm.multi_node_mean(rows[comm.rank])
        np.testing.assert_allclose(mean, np.mean(rows, 0), rtol=1e-9, atol=1e-9)


@world_tests
@pytest.mark.sizes(2, 3)
def test_a_rank_that_is_alone_has_its_own_mean(world):
    with by_circulant(), create_communicator("flat", world.Split(world.rank)) as comm:
        check_mean(comm)


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [5, pytest.param(7, marks=pytest.mark.full)])
def test_means_of_more_ranks_are_right(ranks):
    job = runner.run(ranks, "-m", "tests.support.worlds.circulant")
    assert job.returncode == 0, job
    assert job.out.split() == ["MEANS", str(3 * 2 * (CALLS + 1))], job


@pytest.mark.full
def test_means_of_so_many_ranks_that_sums_go_in_rounds_anyway_are_right():
    job = runner.run(17, "-m", "tests.support.worlds.circulant", seconds=600)
    assert job.returncode == 0, job
    assert job.out.split() == ["MEANS", str(3 * 2 * (CALLS + 1))], job


@pytest.mark.parametrize("ranks", [*range(2, 70), 127, 128, 129, 1000, 1023, 1024])
def test_all_blocks_but_one_are_sent_in_as_few_rounds_as_can_be(ranks):
    rounds = rounds_of(ranks)
    assert len(rounds) == math.ceil(math.log2(ranks))
    assert sum(held - skip for skip, held in rounds) == ranks - 1
    # Each term comes to each block once: offsets that a rank's partial sums cover.
    covers = {0}
    for skip, _ in rounds:
        covers |= {offset + skip for offset in covers if offset + skip < ranks}
    assert covers == set(range(ranks))


@pytest.mark.parametrize("size", [2, 16, 17, 1000])
def test_from_17_ranks_on_sums_go_in_rounds(size):
    assert is_chosen_for(size) == (size > 16)


def test_memory_hardly_grows_with_the_number_of_ranks(monkeypatch):
    monkeypatch.setattr(circulant, "start_exchange", lambda *_: [])
    grad = np.zeros(40 << 20, "f4")
    for size, most_mib in (17, 8), (100, 10), (1000, 14):
        used = most_bytes_of_a_sum(size, grad)
        assert 3 < used / (1 << 20) < most_mib
