"""Large arrays of ranks that share no memory get the bits that all other algorithms give them."""

from __future__ import annotations

import random
import threading
import time
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest

from chainermn_comm import create_communicator, patient_waits
from chainermn_comm.sums import pairwise
from tests.support.worlds.circulant import most_bytes_of_a_sum
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

SIZES = (300_001, 1 << 20, 262_144, 1_000_003, 7)


@cache
def drawn(rank, dtype, call=0):
    rng = np.random.default_rng(100 * call + rank)
    return {
        f"p{i}": rng.standard_normal(size).astype(dtype) for i, size in enumerate(SIZES)
    }


def means(comm, dtype, call=0):
    model = with_grads(
        **{name: a.copy() for name, a in drawn(comm.rank, dtype, call).items()}
    )
    comm.allreduce_grad(model)
    return {name: param.grad.tobytes() for name, param in model.namedparams()}


def apart(world, name="hierarchical"):
    return on_nodes(range(world.size), name)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_the_bits_are_those_of_flat(world, name, dtype):
    with apart(world, name) as comm, create_communicator("flat") as flat:
        assert means(comm, dtype) == means(flat, dtype)


def test_back_to_back_calls_with_delays_do_not_mix(world):
    delays = random.Random(world.rank)
    with apart(world) as comm, create_communicator("flat") as flat:
        expected = [means(flat, "float32", call) for call in range(3)]
        for call in range(9):
            time.sleep(delays.uniform(0, 2e-3))
            assert means(comm, "float32", call % 3) == expected[call % 3]


@pytest.mark.parametrize("nodes", ["together", "apart"])
def test_patient_waits_give_the_same_bits_also_where_some_are_urgent_or_not_patient(
    world, nodes
):
    with (
        create_communicator("hierarchical")
        if nodes == "together"
        else apart(world) as comm
    ):
        expected = means(comm, "float32")
        everybody = range(world.size)
        cases = [(everybody, ()), (everybody, (0,)), (everybody, everybody), ((), ())]
        for patient, hurrying in [*cases, *(((rank,), ()) for rank in everybody)]:
            urgent = threading.Event()
            if world.rank in hurrying:
                urgent.set()
            with patient_waits(urgent) if world.rank in patient else nullcontext():
                assert means(comm, "float32") == expected


@pytest.mark.ranks(2)
def test_what_is_received_hardly_grows_with_the_number_of_ranks(world, monkeypatch):
    monkeypatch.setattr(pairwise, "start_exchange", lambda *_: [])
    grad = np.zeros(20 << 20, "f4")
    for size, most_mib in (2, 9), (4, 10), (9, 10), (100, 10), (1000, 40):
        used = most_bytes_of_a_sum(size, grad, reproducible=True)
        assert 1 / 2 < used / (1 << 20) < most_mib
