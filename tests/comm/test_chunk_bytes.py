"""The size of chunks that the user asks for: every algorithm keeps to it."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from chainermn_comm import RankMismatchError, create_communicator
from tests.comm.inside import recorded_sizes
from tests.support.doubles import gpus
from tests.support.doubles.cupy_double import installed
from tests.support.plugins.pairwise import pairwise
from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.topologies import IMPOSED, on_nodes, over_nodes

pytestmark = pytest.mark.world

VARIABLE = "CHAINERMN_CHUNK_BYTES"
WIRE_DTYPES = (None, "float16", "float64")


def whole_numbers(rank):
    """Gradients whose sums are exact."""
    shapes = {"a": (), "b": (3, 7), "c": (0,), "d": (1,), "e": (257,), "f": (16,)}
    rows = {"g": np.arange(30, dtype="float64") + 12 * rank}
    for name, shape in shapes.items():
        numbers = np.arange(np.prod(shape)) % 11 + 12.0 * rank
        rows[name] = numbers.reshape(shape).astype("f4")
    return rows


@over_nodes("naive", "flat", "hierarchical", "two_dimensional", least=1)
@pytest.mark.parametrize("way", [nullcontext, by_circulant])
@pytest.mark.parametrize("chunk_bytes", [64, 4096])
def test_tiny_chunks_give_the_mean(world, monkeypatch, name, nodes, chunk_bytes, way):
    monkeypatch.setenv(VARIABLE, str(chunk_bytes))
    with way(), on_nodes(nodes, name) as comm:
        for wire in WIRE_DTYPES:
            comm.set_config("allreduce_grad_dtype", wire)
            rows = [whole_numbers(rank) for rank in range(world.size)]
            if wire is None:  # which would not be complex; chunks hold four of these
                for rank, row in enumerate(rows):
                    row["h"] = (np.arange(41) * (1 + 2j) + 12 * rank).astype("c32")
            own = {key: grad.copy() for key, grad in rows[world.rank].items()}
            comm.allreduce_grad(model := with_grads(**own))
            for key, first in rows[0].items():
                expected = first + 12 * (world.size - 1) / 2
                assert_array_equal(model[key].grad, expected)


@pytest.mark.parametrize("name", ["naive", "flat", "hierarchical"])
def test_no_chunk_is_larger(world, monkeypatch, name):
    monkeypatch.setenv(VARIABLE, "128")
    with (
        recorded_sizes() as used,
        create_communicator(name) as comm,
        comm.split(0, 0) as part,
    ):
        monkeypatch.delenv(VARIABLE)  # a split keeps what its parent was made with
        small = {f"p{i}": np.ones(7, "f4") for i in range(5)}
        part.allreduce_grad(with_grads(**small, w=np.ones(400, "f4")))
    # Small arrays go together, whole; a large one in pieces, which messages take from
    # where they are, as they do with what is alone in a chunk.
    if name == "hierarchical" and world.size > 1:
        assert used["packed"] == [112, *[128] * 12, 64, 28]
    else:
        assert set(used["packed"]) <= {112}
        assert max(used["sent"], default=0) <= 128


@pairwise(
    name=["hierarchical", "two_dimensional", "pure_nccl"],
    chunk_bytes=[64, 192, 4096],
    wire=[None, "float16"],
)
@pytest.mark.ranks(2)
def test_gradients_on_gpus_keep_to_it(world, monkeypatch, name, chunk_bytes, wire):
    monkeypatch.setenv(VARIABLE, str(chunk_bytes))
    nodes = IMPOSED[world.size][-1]
    own = whole_numbers(world.rank)
    how = {"allreduce_grad_dtype": wire}
    with installed() as gpu, on_nodes(nodes, name, **how) as comm:
        gpu.delay = 0
        found = gpus.means_of(comm, list(own.values()))
        for mean, first in zip(found, whole_numbers(0).values(), strict=True):
            assert_array_equal(mean, first + 12 * (world.size - 1) / 2)
        nbytes = [grad.size * (2 if wire else grad.itemsize) for grad in own.values()]
        assert sum(gpu.packed) == sum(nbytes)
        assert 0 < max(gpu.packed) <= chunk_bytes


@pytest.mark.sizes(2, 3, 4)
def test_ranks_must_agree_on_the_variable(world, monkeypatch):
    first = world.rank == 0
    for value, told in (("128", "128 on rank 0; 64 on rank"), ("", "None on rank 0")):
        monkeypatch.setenv(VARIABLE, value if first else "64")
        with pytest.raises(RankMismatchError, match=f"{VARIABLE}: {told}"):
            create_communicator("flat")
    monkeypatch.setenv(VARIABLE, "128" if first else " 128")  # the same size
    with create_communicator("flat") as comm:
        check_mean(comm)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_it_is_a_setting_of_all_ranks_until_gradients_travel(world, name):
    with create_communicator(name) as comm:
        for wrong in 0, 100, "many", 1 << 40, True:
            with pytest.raises(ValueError, match="chunk_bytes must be a number of"):
                comm.set_config("chunk_bytes", wrong)
        if comm.rank == 1:
            comm.set_config("chunk_bytes", 1 << 16)
        told = r"chunk_bytes: None on rank.* 65536 on rank"
        with pytest.raises(RankMismatchError, match=told):
            check_mean(comm)
        with pytest.raises(RankMismatchError, match=told):
            comm.allreduce(np.ones(500, "f4"))
        comm.set_config("chunk_bytes", 1 << 16)
        assert comm.allreduce(np.ones(500, "f4"))[-1] == comm.size
        with comm.split(0, comm.rank) as part:
            assert part.get_config("chunk_bytes") == 1 << 16
            check_mean(part, 300_001)
            for each in comm, part:  # which have summed arrays, and gradients
                each.set_config("chunk_bytes", 1 << 16)  # no change
                with pytest.raises(ValueError, match="right after making the comm"):
                    each.set_config("chunk_bytes", None)
            check_mean(part, 300_001)
