"""Communicators, one of them a third party's, and random arrays that are the same on all ranks."""

from __future__ import annotations

import pytest
from numpy.random import default_rng

from tests.support.training.trainers import all_compared as all_compared
from tests.support.worlds.third_party import PlainCommunicator


@pytest.fixture(params=["naive", pytest.param("third party", marks=pytest.mark.full)])
def comm(request):
    """A communicator over all ranks; by default ours, but for tests marked WITH_THIRD_PARTY."""
    from mpi4py import MPI

    from chainermn_comm import create_communicator

    plain = request.param == "third party"
    with (
        PlainCommunicator(MPI.COMM_WORLD)
        if plain
        else create_communicator("naive") as made
    ):
        yield made


@pytest.fixture
def random():
    """The same numbers on each rank, so that each can compute the single-process equivalent."""
    return default_rng(20261120)
