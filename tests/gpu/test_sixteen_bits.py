"""The error of a mean that travels in 16 bits through NCCL: its bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.doubles import gpus
from tests.support.worlds.topologies import IMPOSED, on_nodes

pytestmark = [pytest.mark.world, pytest.mark.ranks(3)]

# Bits after the leading one, and the exponent of the smallest number.
WIRES = {"float16": (10, -24), "bfloat16": (7, -133)}
NAMES = ("pure_nccl", "hierarchical", "two_dimensional")
INPUTS = st.tuples(
    st.integers(0, 2**31),
    st.sampled_from([1, 7, 5000]),
    st.sampled_from([0, -12, -20, 10]),
)


def draw(rank: int, seed: int, size: int, exponent: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rank])
    return np.ldexp(rng.standard_normal(size), exponent).astype("f4")


def bound(rows: list[np.ndarray], wire: str) -> np.ndarray:
    """What docs/decisions/gpus.md says of the difference from the exact mean."""
    bits, smallest = WIRES[wire]
    unit, n = 2.0 ** -(bits + 1), len(rows)
    each = sum(np.abs(row.astype("f8")) for row in rows) / n
    return 1.01 * n * unit * each + n * 2.0 ** (smallest - 1)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", NAMES)
def test_the_error_is_within_its_bound(world, double, name, wire):
    double.delay = 0
    with on_nodes(IMPOSED[world.size][-1], name, allreduce_grad_dtype=wire) as comm:
        comm.set_config("chunk_bytes", 1 << 12)

        @settings(max_examples=15)
        @given(INPUTS)
        def check(how):
            rows = [draw(rank, *how) for rank in range(world.size)]
            mean = gpus.mean_of(comm, rows[world.rank])
            exact = sum(row.astype("f8") for row in rows) / world.size
            difference = np.abs(mean.astype("f8") - exact)
            assert np.all(difference <= bound(rows, wire))
            assert comm.allgather_obj(mean.tobytes()) == [mean.tobytes()] * world.size

        check()
