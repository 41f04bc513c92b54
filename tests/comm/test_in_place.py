"""Large arrays of ranks that share no memory get the bits that all other ways give them."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from chainermn_comm import create_communicator, patient_waits
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.in_place import InPlace
from chainermn_comm.topology import Topology
from tests.support.models import with_grads

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

SIZES = (300_001, 1 << 20, 262_144, 1_000_003, 7)


def gradients(rank, dtype, call=0):
    rng = np.random.default_rng(100 * call + rank)
    return {f"p{i}": rng.standard_normal(size).astype(dtype) for i, size in enumerate(SIZES)}


def means(comm, dtype, call=0):
    model = with_grads(**gradients(comm.rank, dtype, call))
    comm.allreduce_grad(model)
    return {name: param.grad.tobytes() for name, param in model.namedparams()}


def apart(world, name="hierarchical"):
    return make_communicator(name, topology=Topology.of(range(world.size)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_the_bits_are_those_of_flat(world, monkeypatch, name, dtype):
    used = []
    real = InPlace.mean
    monkeypatch.setattr(InPlace, "mean", lambda *args: (used.append(len(args[1])), real(*args)))
    with apart(world, name) as comm, create_communicator("flat") as flat:
        assert means(comm, dtype) == means(flat, dtype)
    assert used


def test_back_to_back_calls_with_delays_do_not_mix(world):
    delays = random.Random(world.rank)
    with apart(world) as comm, create_communicator("flat") as flat:
        expected = [means(flat, "float32", call) for call in range(5)]
        for call in range(20):
            time.sleep(delays.uniform(0, 2e-3))
            assert means(comm, "float32", call % 5) == expected[call % 5]


@pytest.mark.parametrize("nodes", ["together", "apart"])
def test_patient_waits_give_the_same_bits_also_when_some_ranks_hurry(world, nodes):
    with create_communicator("hierarchical") if nodes == "together" else apart(world) as comm:
        expected = means(comm, "float32")
        for hurrying in (), (0,), range(world.size):
            hurry = threading.Event()
            if world.rank in hurrying:
                hurry.set()
            with patient_waits(hurry):
                assert means(comm, "float32") == expected
        assert means(comm, "float32") == expected


@pytest.mark.parametrize("nodes", ["together", "apart"])
def test_one_rank_alone_may_be_patient(world, nodes):
    with create_communicator("hierarchical") if nodes == "together" else apart(world) as comm:
        expected = means(comm, "float32")
        for patient in range(world.size):
            if world.rank == patient:
                with patient_waits(threading.Event()):
                    assert means(comm, "float32") == expected
            else:
                assert means(comm, "float32") == expected


def test_the_size_of_chunks_is_a_setting_until_gradients_travel(world):
    for name in "flat", "hierarchical":
        with create_communicator(name) as comm:
            for wrong in 0, 100, "many", 1 << 40, True:
                with pytest.raises(ValueError, match="chunk_bytes must be a number of bytes"):
                    comm.set_config("chunk_bytes", wrong)
            comm.set_config("chunk_bytes", 1 << 16)
            with comm.split(0, comm.rank) as part:
                assert part.get_config("chunk_bytes") == 1 << 16
            expected = means(comm, "float32")
            with create_communicator(name) as other:
                assert means(other, "float32") == expected
            comm.set_config("chunk_bytes", 1 << 16)  # no change
            with pytest.raises(ValueError, match="right after making the communicator"):
                comm.set_config("chunk_bytes", None)
            assert means(comm, "float32") == expected
