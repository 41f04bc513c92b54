"""NCCL's communicators are made within a time, or a rank's failure ends the waiting of all."""

from __future__ import annotations

import re

import numpy as np
import pytest

from chainermn_comm import CommunicationError, create_communicator
from tests.support.doubles import gpus
from tests.support.doubles.nccl_double import NcclError
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]

FAILURE = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"


def test_a_rank_that_fails_inside_does_not_hang_the_others(world, double):
    with create_communicator("pure_nccl") as comm:
        if world.rank == 1:
            double.plant("commInitRank", NcclError(FAILURE))
        with pytest.raises(CommunicationError, match=FAILURE):
            gpus.assert_mean(comm)
        gpus.assert_mean(comm)


@pytest.mark.ci
@pytest.mark.parametrize("limit", ["CHAINERMN_NCCL_TIMEOUT", "CHAINERMN_TIMEOUT"])
def test_a_rank_that_never_gets_there_is_waited_for_so_long_and_no_longer(
    world, double, monkeypatch, limit
):
    with create_communicator("pure_nccl") as comm:
        monkeypatch.setenv("CHAINERMN_NCCL_TIMEOUT", "10000")
        monkeypatch.setenv(limit, "1")
        double.init_hangs = world.rank == 1
        told = "not connected the ranks within 1 s.*NCCL_DEBUG.*CHAINERMN_NCCL_TIMEOUT"
        with pytest.raises(CommunicationError, match=told):
            gpus.assert_mean(comm)
        # What comes late after all is aborted; the next attempt is one of its own.
        double.init_hangs = False
        monkeypatch.delenv("CHAINERMN_NCCL_TIMEOUT")
        monkeypatch.delenv("CHAINERMN_TIMEOUT", raising=False)
        gpus.assert_mean(comm)
    assert set(double.calls) <= {"pack_f", "unpack_f", "allReduce", "abort", "destroy"}


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_time_that_is_none_raises_on_all(world, one_each, monkeypatch, text):
    with create_communicator("pure_nccl") as comm:
        if world.rank == 1:  # it is checked again, as NCCL is connected much later
            monkeypatch.setenv("CHAINERMN_NCCL_TIMEOUT", text)
        told = (
            f"rank 1.*CHAINERMN_NCCL_TIMEOUT must be seconds, more than 0, got '{text}'"
        )
        with pytest.raises(CommunicationError, match=told):
            gpus.assert_mean(comm)
        monkeypatch.delenv("CHAINERMN_NCCL_TIMEOUT", raising=False)
        gpus.assert_mean(comm)


@pytest.mark.sizes(3, 4)
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_where_nccl_does_not_connect_nodes_rank_0_says_so_and_mpi_does(
    world, double, capfd, name
):
    nodes = (0, 0, 1, 1)[: world.size]
    with on_nodes(nodes, name) as comm:
        if comm.intra_rank == 0 and comm.inter_rank == 1:
            double.plant("commInitRank", NcclError(FAILURE))
        means = gpus.means_of(comm, [np.full(5000, comm.rank, "f4")])
        np.testing.assert_allclose(means[0], (world.size - 1) / 2, rtol=1e-6)
        said = capfd.readouterr().err
        told = rf"ChainerMN: NCCL doesn't connect the nodes \(.*{FAILURE}.*host memory and MPI\n"
        assert bool(re.search(told, said)) == (world.rank == 0)
        gpus.assert_mean(comm)
        assert not capfd.readouterr().err  # it is said once
    assert not double.planted


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("name", "inits"),
    [("hierarchical", 1), ("non_cuda_aware", 0), ("flat", 0), ("pure_nccl", 1)],
)
def test_one_gpu_a_node_needs_nccl_between_nodes_alone(world, double, name, inits):
    with on_nodes(range(world.size), name) as comm:
        gpus.assert_mean(comm)
    assert double.made.count("commInitRank") == inits


@pytest.mark.sizes(1)
@pytest.mark.parametrize("name", gpus.NCCL)
def test_a_single_rank_needs_no_nccl(world, double, name):
    with create_communicator(name) as comm:
        means = gpus.means_of(comm, [np.arange(5, dtype="f4"), np.ones(3, "f8")])
    np.testing.assert_array_equal(means[0], np.arange(5))
    assert "commInitRank" not in double.made
