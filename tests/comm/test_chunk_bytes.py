"""The size of chunks that the user asks for: every way of gradients keeps to it."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import (
    PeerError,
    RankMismatchError,
    create_communicator,
    cuda_aware,
    devices,
)
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.chunks import Chunk
from chainermn_comm.settings import CHUNK_VARIABLE
from chainermn_comm.topology import Topology
from chainermn_comm.transports.mpi import MpiTransport
from tests.support.cupy_double import installed
from tests.support.models import with_grads
from tests.support.topologies import IMPOSED, telling

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
@pytest.mark.parametrize("name", ["naive", "flat", "hierarchical", "two_dimensional"])
def test_tiny_chunks_give_the_mean(world, monkeypatch, name, chunk_bytes, wire):
    monkeypatch.setenv(CHUNK_VARIABLE, str(chunk_bytes))
    for nodes in telling(name, world.size):
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


@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional", "single_node"])
@pytest.mark.sizes(2, 3, 4)
def test_large_arrays_keep_to_it_on_each_way_that_is_tried(world, monkeypatch, name):
    chunk_bytes = 65536
    used: dict[str, list[int]] = {"packed": [], "sent": []}
    pack, exchange = Chunk.pack, MpiTransport._exchange

    def packing(self, flats, out) -> None:
        used["packed"].append(self.nbytes)
        pack(self, flats, out)

    def exchanging(self, outgoing, incoming) -> None:
        used["sent"] += [shard.nbytes for shard in outgoing]
        exchange(self, outgoing, incoming)

    monkeypatch.setattr(Chunk, "pack", packing)
    monkeypatch.setattr(MpiTransport, "_exchange", exchanging)
    monkeypatch.setenv(CHUNK_VARIABLE, str(chunk_bytes))
    with create_communicator(name) as comm:
        for _ in range(6):  # of two ways; each is new twice, since its first use isn't timed
            model = with_grads(w=np.arange(300_001, dtype="f4") + np.float32(2 * world.rank))
            comm.allreduce_grad(model)
            expected = np.arange(300_001, dtype="f4") + np.float32(world.size - 1)
            np.testing.assert_array_equal(model["w"].grad, expected)
    for nbytes in used.values():
        assert nbytes
        assert max(nbytes) <= chunk_bytes


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize("chunk_bytes", [64, 192, 4096])
@pytest.mark.parametrize("name", ["flat", "hierarchical", "two_dimensional", "pure_nccl"])
@pytest.mark.parametrize("cuda_aware_mpi", [False, True])
def test_gradients_on_gpus_keep_to_it(world, monkeypatch, name, chunk_bytes, wire, cuda_aware_mpi):
    monkeypatch.setenv(CHUNK_VARIABLE, str(chunk_bytes))
    monkeypatch.setattr(cuda_aware, "mpi_takes_gpu_memory", lambda: cuda_aware_mpi)
    topology = Topology.of(IMPOSED[world.size][-1])
    with installed() as gpu, make_communicator(name, None, wire, topology=topology) as comm:
        gpu.delay = 0
        own = gradients(world.rank)
        model = with_grads(**{key: devices.to_device(grad) for key, grad in own.items()})
        comm.allreduce_grad(model)
        for key, first in gradients(0).items():
            expected = first + 12 * (world.size - 1) / 2
            np.testing.assert_array_equal(devices.to_host(model[key].grad), expected)
        total = sum(g.size * (2 if wire else g.itemsize) for g in own.values())
        assert sum(gpu.packed) == total
        assert max(gpu.packed) <= chunk_bytes


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


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_a_size_that_one_rank_sets_alone_is_told(world, name):
    with create_communicator(name) as comm:
        if comm.rank == 1:
            comm.set_config("chunk_bytes", 128)
        with pytest.raises(RankMismatchError, match=r"chunk_bytes: None on rank.* 128 on rank"):
            comm.allreduce_grad(with_grads(w=np.ones(500, "f4")))
        with pytest.raises(RankMismatchError, match="chunk_bytes"):
            comm.allreduce(np.ones(500, "f4"))
        comm.set_config("chunk_bytes", 128)
        np.testing.assert_array_equal(comm.allreduce(np.ones(500, "f4")), np.full(500, comm.size))


@pytest.mark.sizes(2)
def test_the_same_size_written_otherwise_is_the_same(world, monkeypatch):
    monkeypatch.setenv(CHUNK_VARIABLE, " 128" if world.rank else "128")
    create_communicator("flat").finalize()
