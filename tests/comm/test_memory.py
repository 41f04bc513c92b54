"""The memory that taking the mean of gradients needs does not grow with the model."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tests.support.worlds.models import Model, Param
from tests.support.worlds.one_of_many import most_bytes
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 4)]

MIB, FULL = 1 << 20, pytest.mark.full
# Half of a model's bytes are in so many large arrays, the others in small ones, packed
# together.
PARAMETERS = 5
SMALL_BYTES = 1 << 16
# A few chunks: of what NumPy allocates, for any model. Windows come on top, and don't
# grow.
FEW_CHUNKS = 16 * MIB


def extra_bytes(comm, megabytes: int, transposed: bool = False) -> int:
    """The most that NumPy held during a call, beside what it held before.

    `transposed` makes one of the model's large arrays so.
    """
    side = int((megabytes * MIB / 2 / 4 / PARAMETERS) ** 0.5)
    grads: dict[str, np.ndarray] = {
        f"p{i}": np.ones((side, side), "f4") for i in range(PARAMETERS)
    }
    if transposed:
        grads["p0"] = grads["p0"].T
    count = megabytes * MIB // 2 // SMALL_BYTES
    grads |= {f"small{i:04}": np.ones(SMALL_BYTES // 4, "f4") for i in range(count)}
    # The gradients stand in for the parameters too, which only lend shape and dtype.
    model = Model(**{name: Param(grad, grad) for name, grad in grads.items()})
    gc.collect()
    return most_bytes(lambda: comm.allreduce_grad(model))


# On which node each rank is.
WHERE = {
    "together": lambda size: (0,) * size,
    "apart": range,
    "in pairs": lambda size: [rank * 2 // size for rank in range(size)],
}


# The other names take, on one node, the algorithm of `hierarchical`.
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "where", "wire"),
    [
        ("naive", "together", None),
        ("flat", "together", "float16"),
        ("hierarchical", "together", None),
        ("hierarchical", "together", "float16"),
        ("hierarchical", "apart", None),
        pytest.param(
            "two_dimensional", "in pairs", "float16", marks=pytest.mark.ranks(4)
        ),
        pytest.param("naive", "together", "float16", marks=FULL),
        pytest.param("flat", "together", None, marks=FULL),
        pytest.param("hierarchical", "apart", "float16", marks=FULL),
        pytest.param("hierarchical", "in pairs", None, marks=FULL),
        pytest.param("hierarchical", "in pairs", "float16", marks=FULL),
        pytest.param("two_dimensional", "in pairs", None, marks=FULL),
        pytest.param("two_dimensional", "apart", None, marks=FULL),
        pytest.param("two_dimensional", "apart", "float16", marks=FULL),
    ],
)
def test_extra_memory_does_not_grow_with_the_model(world, name, where, wire):
    with on_nodes(WHERE[where](world.size), name, allreduce_grad_dtype=wire) as comm:
        first = extra_bytes(comm, 100)  # with what is made at first use
        small, large = extra_bytes(comm, 4), extra_bytes(comm, 100)
        assert max(first, large) < FEW_CHUNKS
        # An array takes 10 MB in the large model, and the small ones 50 MB: not even
        # one of the former is copied, nor a fifth of the latter.
        assert large - small < 8 * MIB


@pytest.mark.ci
@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_a_gradient_that_is_replaced_takes_its_own_size_and_a_copy(world, name):
    with on_nodes((0,) * world.size, name) as comm:
        extra_bytes(comm, 4)
        replaced = 100 * MIB / 2 / PARAMETERS
        assert extra_bytes(comm, 100, transposed=True) < 2 * replaced + FEW_CHUNKS
