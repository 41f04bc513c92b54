"""The error of a mean that travels in 16 bits through NCCL: its bound, and sums in float32."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_comm import RankMismatchError, create_communicator
from tests.support import gpus
from tests.support.models import Model, Param
from tests.support.topologies import IMPOSED, on_nodes

pytestmark = [pytest.mark.world, pytest.mark.ranks(3)]

# Bits after the leading one, and the exponent of the smallest number.
WIRES = {"float16": (10, -24), "bfloat16": (7, -133)}
NAMES = ("pure_nccl", "hierarchical", "two_dimensional")
INPUTS = st.tuples(
    st.integers(0, 2**31), st.sampled_from([1, 7, 5000]), st.sampled_from([0, -12, -20, 10])
)


def draw(rank: int, seed: int, size: int, exponent: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rank])
    return np.ldexp(rng.standard_normal(size), exponent).astype("f4")


def bound(rows: list[np.ndarray], wire: str, reduce_dtype: str | None) -> np.ndarray:
    """What docs/decisions/float16.md says of the difference from the exact mean."""
    bits, smallest = WIRES[wire]
    unit, n = 2.0 ** -(bits + 1), len(rows)
    each = sum(np.abs(row.astype("f8")) for row in rows) / n
    if reduce_dtype is not None:
        return 1.01 * unit * each + 2.0 ** (smallest - 1) + n * 2.0**-23 * each
    return 1.01 * n * unit * each + n * 2.0 ** (smallest - 1)


@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_within_its_bound(world, double, name, wire, reduce_dtype):
    double.delay = 0
    with on_nodes(IMPOSED[world.size][-1], name, allreduce_grad_dtype=wire) as comm:
        comm.set_config("reduce_dtype", reduce_dtype)
        comm.set_config("chunk_bytes", 1 << 12)

        @settings(max_examples=15)
        @given(INPUTS)
        def check(how):
            rows = [draw(rank, *how) for rank in range(world.size)]
            mean = gpus.mean_of(comm, rows[world.rank])
            exact = sum(row.astype("f8") for row in rows) / world.size
            difference = np.abs(mean.astype("f8") - exact)
            assert np.all(difference <= bound(rows, wire, reduce_dtype))
            assert comm.allgather_obj(mean.tobytes()) == [mean.tobytes()] * world.size

        check()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", NAMES)
def test_sums_in_float32_are_rounded_once(world, double, name, wire):
    """Terms that a sum in 16 bits loses: each is less than half a unit of the first."""
    with on_nodes(IMPOSED[world.size][-1], name, allreduce_grad_dtype=wire) as comm:
        comm.set_config("reduce_dtype", "float32")
        n, unit = world.size, 2.0 ** -WIRES[wire][0]
        own = n * (1.0 if world.rank == 0 else 0.45 * unit)
        means = gpus.means_of(comm, [np.full(size, own, "f4") for size in (3001, 2, 64)])
        exact = 1 + (n - 1) * 0.45 * unit
        for mean in means:
            assert np.all(np.abs(mean - exact) <= unit / 2)
        wires = {call for call in double.calls if call.startswith(("pack", "cast", "unpack"))}
        letter = {"float16": "e", "bfloat16": "b"}[wire]
        nodes = IMPOSED[world.size][-1]
        leaders = {"hierarchical": 1, "two_dimensional": min(map(nodes.count, nodes))}
        leads = comm.intra_rank < leaders.get(name, world.size)
        assert wires == {"pack_f", f"unpack_{letter}"} | ({f"cast_{letter}"} if leads else set())


def test_other_wires_and_mpi_sum_as_ever(world, double):
    rows = [draw(rank, 1, 3000, 0) for rank in range(world.size)]
    for name, wire in (("flat", "float16"), ("pure_nccl", None), ("pure_nccl", "float64")):
        found = []
        for reduce_dtype in (None, "float32"):
            with create_communicator(name, allreduce_grad_dtype=wire) as comm:
                comm.set_config("reduce_dtype", reduce_dtype)
                assert comm.get_config("reduce_dtype") == reduce_dtype
                found.append(gpus.mean_of(comm, rows[world.rank]))
        np.testing.assert_array_equal(*found)
    assert not any(call.startswith("cast") for call in double.calls)


@pytest.mark.sizes(2, 3, 4)
def test_the_setting_is_checked(world, one_each):
    with create_communicator("pure_nccl", allreduce_grad_dtype="float16") as comm:
        with pytest.raises(ValueError, match="reduce_dtype must be None or float32, got 'float64'"):
            comm.set_config("reduce_dtype", "float64")
        comm.set_config("reduce_dtype", "float32" if world.rank == 0 else None)
        grad = gpus.put(np.ones(3, "f4"))
        with pytest.raises(RankMismatchError, match=r"reduce_dtype.*float32 on rank 0"):
            comm.allreduce_grad(Model(w=Param(grad, grad)))
        comm.set_config("reduce_dtype", None)
        gpus.assert_mean(comm)
        with pytest.raises(ValueError, match="reduce_dtype can't be changed any more"):
            comm.set_config("reduce_dtype", "float32")
