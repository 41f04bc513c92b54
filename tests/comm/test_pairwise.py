"""Large arrays of ranks that share no memory get the bits that all other algorithms give them."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy as np
import pytest
from numpy.random import default_rng

from chainermn_comm import patient_waits
from chainermn_comm.sums import pairwise
from tests.support.plugins import pairwise as pairs
from tests.support.worlds.circulant import most_bytes_of_a_sum
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

SIZES = (300_001, 1 << 20, 262_144, 1_000_003, 7)


def gradients(rank, dtype):
    rng = default_rng(rank)
    return {f"p{size}": rng.standard_normal(size, "f4").astype(dtype) for size in SIZES}


def means(comm, dtype):
    model = with_grads(**gradients(comm.rank, dtype))
    comm.allreduce_grad(model)
    return {name: param.grad.tobytes() for name, param in model.namedparams()}


@pairs.pairwise(nodes=[1, 4], hurrying=[(), (0,)], patient=[(0,), (0, 1, 2, 3)])
def test_patient_waits_give_the_same_bits_also_where_some_are_urgent_or_not_patient(
    world, nodes, hurrying, patient
):
    urgent = threading.Event()
    if world.rank in hurrying:
        urgent.set()
    with on_nodes(rank % nodes for rank in range(world.size)) as comm:
        expected = means(comm, "float32")
        waits = nullcontext()
        if world.rank in patient:
            waits = patient_waits(urgent)
        with waits:
            assert means(comm, "float32") == expected


@pytest.mark.ranks(2)
def test_what_is_received_hardly_grows_with_the_number_of_ranks(world, monkeypatch):
    monkeypatch.setattr(pairwise, "start_exchange", lambda *_: [])
    grad = np.zeros(20 << 20, "f4")
    for size, most_mib in (2, 9), (4, 10), (9, 10), (100, 10), (1000, 40):
        used = most_bytes_of_a_sum(size, grad, reproducible=True)
        assert 1 / 2 < used / (1 << 20) < most_mib
