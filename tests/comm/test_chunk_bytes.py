"""The size of chunks that the user asks for: every way of gradients keeps to it."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.chunks import Chunk
from chainermn_comm.settings import CHUNK_VARIABLE
from chainermn_comm.topology import Topology

from .conftest import IMPOSED, NAMES
from .models import with_grads

pytestmark = pytest.mark.world


def gradients(rank: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Whole numbers, whose sums are exact."""
    shapes = {"a": (), "b": (3, 7), "c": (0,), "d": (1,), "e": (257,), "f": (16,)}
    return {
        name: np.asarray(np.arange(np.prod(shape)).reshape(shape) % 11 + 12.0 * rank, dtype)
        for name, shape in shapes.items()
    } | {"g": np.arange(30, dtype="float64") + 12 * rank}


@pytest.mark.parametrize("wire", [None, "float16", "float64"])
@pytest.mark.parametrize("chunk_bytes", [64, 192, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_tiny_chunks_give_the_mean(world, monkeypatch, name, chunk_bytes, wire):
    monkeypatch.setenv(CHUNK_VARIABLE, str(chunk_bytes))
    for nodes in IMPOSED[world.size]:
        if name == "single_node" and len(set(nodes)) > 1:
            continue
        with make_communicator(
            name, topology=Topology.of(nodes), allreduce_grad_dtype=wire
        ) as comm:
            for _ in range(3):
                model = with_grads(**gradients(world.rank))
                comm.allreduce_grad(model)
                for key, first in gradients(0).items():
                    expected = first + 12 * (world.size - 1) / 2
                    np.testing.assert_array_equal(model[key].grad, expected)


@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional"])
def test_no_chunk_is_larger(world, monkeypatch, name):
    packed = []
    pack = Chunk.pack

    def counting(self, flats, out) -> None:
        packed.append(self.nbytes)
        pack(self, flats, out)

    monkeypatch.setattr(Chunk, "pack", counting)
    monkeypatch.setenv(CHUNK_VARIABLE, "128")
    with create_communicator(name) as comm, comm.split(0, 0) as part:
        monkeypatch.delenv(CHUNK_VARIABLE)  # a split keeps what its parent was made with
        small = {f"p{i}": np.ones(7, "f4") for i in range(5)}
        part.allreduce_grad(with_grads(**small, w=np.ones(40, "f4")))
    # Alone or not: the same chunks. Small arrays go together, whole; a large one in pieces.
    assert packed == [112, 128, 32, 28]


@pytest.mark.parametrize("value", ["0", "-64", "100", "1e6", "512k", "2147483648", "x"])
def test_a_bad_value_names_the_variable_and_what_is_allowed(monkeypatch, value):
    monkeypatch.setenv(CHUNK_VARIABLE, value)
    message = f"CHAINERMN_CHUNK_BYTES must be .* multiple of 64 from 64 to .* got '{value}'"
    with pytest.raises(ValueError, match=message):
        create_communicator("flat")


@pytest.mark.sizes(2, 3, 4)
def test_ranks_must_agree(world, monkeypatch):
    monkeypatch.setenv(CHUNK_VARIABLE, "64" if world.rank else "128")
    with pytest.raises(
        RankMismatchError, match=r"CHAINERMN_CHUNK_BYTES: 128 on rank 0; 64 on ranks? 1"
    ):
        create_communicator("flat")
    monkeypatch.setenv(CHUNK_VARIABLE, "64" if world.rank else "65")
    with pytest.raises(PeerError if world.rank else ValueError, match="CHUNK_BYTES must be"):
        create_communicator("flat")
    monkeypatch.delenv(CHUNK_VARIABLE)
    create_communicator("flat").finalize()


@pytest.mark.sizes(2, 3, 4)
def test_one_rank_without_the_variable_is_told(world, monkeypatch):
    if world.rank:
        monkeypatch.setenv(CHUNK_VARIABLE, "64")
    else:
        monkeypatch.delenv(CHUNK_VARIABLE, raising=False)
    with pytest.raises(RankMismatchError, match="CHAINERMN_CHUNK_BYTES: None on rank 0"):
        create_communicator("flat")
