"""The size of chunks that the user asks for: every algorithm keeps to it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from tests.comm.chunk_sizes import recorded_sizes
from tests.support.doubles import gpus
from tests.support.doubles.cupy_double import installed
from tests.support.plugins.pairwise import pairwise
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.topologies import IMPOSED, on_nodes, over_nodes

pytestmark = pytest.mark.world

VARIABLE = "CHAINERMN_CHUNK_BYTES"
WIRE_DTYPES = (None, "float16", "float64")


def whole_numbers(rank: int) -> dict[str, np.ndarray]:
    """Gradients whose sums are exact."""
    shapes = {"a": (), "b": (3, 7), "c": (0,), "d": (1,), "e": (257,), "f": (16,)}
    return {
        name: np.asarray(
            np.arange(np.prod(shape)).reshape(shape) % 11 + 12.0 * rank, "f4"
        )
        for name, shape in shapes.items()
    } | {"g": np.arange(30, dtype="float64") + 12 * rank}


@over_nodes("naive", "flat", "hierarchical", "two_dimensional", least=1)
@pytest.mark.parametrize("chunk_bytes", [64, 192, 4096])
def test_tiny_chunks_give_the_mean(world, monkeypatch, name, nodes, chunk_bytes):
    monkeypatch.setenv(VARIABLE, str(chunk_bytes))
    for wire in WIRE_DTYPES:
        with on_nodes(nodes, name, allreduce_grad_dtype=wire) as comm:
            for _ in range(3):
                model = with_grads(**whole_numbers(world.rank))
                comm.allreduce_grad(model)
                for key, first in whole_numbers(0).items():
                    expected = first + 12 * (world.size - 1) / 2
                    np.testing.assert_array_equal(model[key].grad, expected)


@over_nodes("two_dimensional", "hierarchical")
def test_the_widest_numbers_in_the_smallest_chunks(world, monkeypatch, name, nodes):
    monkeypatch.setenv(VARIABLE, "64")
    with on_nodes(nodes, name) as comm:
        for dtype, size in product(
            ("complex64", "complex128", "complex256"), (1, 2, 3, 41)
        ):
            rows = [np.arange(size) * (1 + 2j) + 12 * rank for rank in range(comm.size)]
            model = with_grads(w=rows[comm.rank].astype(dtype))
            comm.allreduce_grad(model)
            np.testing.assert_array_equal(model["w"].grad, sum(rows) / comm.size)


@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional"])
def test_no_chunk_is_larger(world, monkeypatch, name):
    monkeypatch.setenv(VARIABLE, "128")
    with (
        recorded_sizes() as used,
        create_communicator(name) as comm,
        comm.split(0, 0) as part,
    ):
        monkeypatch.delenv(VARIABLE)  # a split keeps what its parent was made with
        small = {f"p{i}": np.ones(7, "f4") for i in range(5)}
        part.allreduce_grad(with_grads(**small, w=np.ones(40, "f4")))
    # Small arrays go together, whole; a large one in pieces, which messages take from
    # where they are, as they do with what is alone in a chunk.
    by_messages = name == "flat" or world.size == 1
    assert used["packed"] == ([112] if by_messages else [112, 128, 32, 28])


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "way"), [("hierarchical", "packed"), ("naive", "sent")]
)
def test_large_arrays_keep_to_it(world, monkeypatch, name, way):
    chunk_bytes = 65536
    monkeypatch.setenv(VARIABLE, str(chunk_bytes))
    with recorded_sizes() as used, create_communicator(name) as comm:
        check_mean(comm, 300_001)
    assert 0 < max(used[way]) <= chunk_bytes


@pairwise(
    name=["hierarchical", "two_dimensional", "pure_nccl"],
    chunk_bytes=[64, 192, 4096],
    wire=[None, "float16"],
)
@pytest.mark.ranks(2)
def test_gradients_on_gpus_keep_to_it(world, monkeypatch, name, chunk_bytes, wire):
    monkeypatch.setenv(VARIABLE, str(chunk_bytes))
    nodes, own = IMPOSED[world.size][-1], whole_numbers(world.rank)
    how = {"allreduce_grad_dtype": wire}
    with installed() as gpu, on_nodes(nodes, name, **how) as comm:
        gpu.delay = 0
        found = gpus.means_of(comm, list(own.values()))
        for mean, first in zip(found, whole_numbers(0).values(), strict=True):
            np.testing.assert_array_equal(mean, first + 12 * (world.size - 1) / 2)
        nbytes = [grad.size * (2 if wire else grad.itemsize) for grad in own.values()]
        assert sum(gpu.packed) == sum(nbytes)
        assert 0 < max(gpu.packed) <= chunk_bytes


@pytest.mark.sizes(2, 3, 4)
def test_a_bad_value_names_the_variable_and_what_is_allowed_and_ranks_must_agree(
    world, monkeypatch
):
    def created(value: str, told: str, *errors: type[Exception]) -> None:
        monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(errors, match=f"{VARIABLE}{told}"):
            create_communicator("flat")

    for value in ("0", "-64", "100", "1e6", "512k", "2147483648", "x"):
        created(
            value, f" must be .* multiple of 64 from 64 to .* got '{value}'", ValueError
        )
    first = world.rank == 0
    created(
        "128" if first else "64", ": 128 on rank 0; 64 on ranks? 1", RankMismatchError
    )
    created("" if first else "64", ": None on rank 0", RankMismatchError)
    created("65" if first else "64", " must be", ValueError if first else PeerError)
    monkeypatch.setenv(VARIABLE, "128" if first else " 128")  # the same size
    with create_communicator("flat") as comm:
        check_mean(comm)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_it_is_a_setting_of_all_ranks_until_gradients_travel(world, name):
    with create_communicator(name) as comm:
        for wrong in 0, 100, "many", 1 << 40, True:
            with pytest.raises(
                ValueError, match="chunk_bytes must be a number of bytes"
            ):
                comm.set_config("chunk_bytes", wrong)
        if comm.rank == 1:
            comm.set_config("chunk_bytes", 1 << 16)
        told = r"chunk_bytes: None on rank.* 65536 on rank"
        with pytest.raises(RankMismatchError, match=told):
            check_mean(comm)
        with pytest.raises(RankMismatchError, match=told):
            comm.allreduce(np.ones(500, "f4"))
        comm.set_config("chunk_bytes", 1 << 16)
        np.testing.assert_array_equal(
            comm.allreduce(np.ones(500, "f4")), np.full(500, comm.size)
        )
        with comm.split(0, comm.rank) as part:
            assert part.get_config("chunk_bytes") == 1 << 16
        check_mean(comm, 300_001)
        comm.set_config("chunk_bytes", 1 << 16)  # no change
        with pytest.raises(ValueError, match="right after making the communicator"):
            comm.set_config("chunk_bytes", None)
        check_mean(comm, 300_001)
