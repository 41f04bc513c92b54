"""Every communicator over hosts that share neither memory nor anything but a network."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.worlds.topologies import NAMES

# One process of pytest has what the jobs found.
pytestmark = pytest.mark.xdist_group("cluster/test_communicators.py")

# Ranks on each host, whether they are dealt out in turn, and then the host of each
# rank.
WORLDS: dict[str, tuple[dict[str, int], bool, list[str]]] = {
    "2 hosts": ({"alpha": 2, "beta": 2}, False, ["alpha", "alpha", "beta", "beta"]),
    "2 hosts, alternating": ({"alpha": 2, "beta": 2}, True, ["alpha", "beta"] * 2),
    "3 hosts": (
        {"alpha": 2, "beta": 1, "gamma": 1},
        False,
        ["alpha", "alpha", "beta", "gamma"],
    ),
    "3 hosts, alternating": (
        {"alpha": 2, "beta": 1, "gamma": 1},
        True,
        ["alpha", "beta", "gamma", "alpha"],
    ),
    # Nobody shares memory: large arrays are exchanged where they lie.
    "3 hosts of a rank": (
        {"alpha": 1, "beta": 1, "gamma": 1},
        False,
        ["alpha", "beta", "gamma"],
    ),
}
MEAN = [name for name in NAMES if name != "single_node"]
EVERYWHERE = [*MEAN, "dummy"]
THROUGH_NODES = ("hierarchical", "two_dimensional", "non_cuda_aware")
VALUES = 1_000_003
JOB_SECONDS = 300.0  # ends a hang, no more
HEADERS = 1.15  # what frames, acknowledgements and handshakes add to the bytes


@pytest.fixture(
    scope="module",
    params=[
        "2 hosts",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in WORLDS
            if name != "2 hosts"
        ),
    ],
)
def world(request, cluster) -> tuple[list[str], list[dict[str, Any]]]:
    """The host of each rank, and each rank's findings; one job serves all communicators."""
    ranks, alternating, hosts = WORLDS[request.param]
    names = (*NAMES, "dummy")
    job = cluster.job(
        ranks,
        *("-m", "tests.cluster.every_communicator", VALUES, *names),
        alternating=alternating,
        seconds=JOB_SECONDS,
    )
    assert job.returncode == 0, job
    assert "ChainerMN" not in job.err, job  # such as that shared memory can't be had
    found = json.loads(job.out)
    assert len(found) == len(hosts)
    return hosts, found


@pytest.mark.parametrize("name", EVERYWHERE)
def test_ranks_know_their_place(world, name):
    hosts, found = world
    names = list(dict.fromkeys(hosts))
    for rank, (host, mine) in enumerate(zip(hosts, found, strict=True)):
        intra = hosts[:rank].count(host), hosts.count(host)
        assert mine[name]["host"] == host
        assert mine[name]["place"] == [*intra, names.index(host), len(names)]


@pytest.mark.parametrize("name", MEAN)
def test_the_mean_is_right_and_bit_identical_and_goes_over_the_network(world, name):
    hosts, found = world
    nodes = len(set(hosts))
    # Of an allreduce between nodes: reduce-scatter, allgather.
    share = 2 * (nodes - 1) / nodes
    for mine in found:
        for wire, nbytes in (("wide", 4 * VALUES), ("narrow", 2 * VALUES)):
            assert mine[name][wire]["wrong"] == []
            assert mine[name][wire]["sent"] >= share * nbytes
            if name in THROUGH_NODES:  # the ranks of a node send nothing twice
                assert mine[name][wire]["sent"] <= HEADERS * share * nbytes


@pytest.fixture(scope="module")
def on_one_host(cluster):
    """The findings of four ranks that share memory."""
    arguments = (
        "-m",
        "tests.cluster.every_communicator",
        VALUES,
        "hierarchical",
        "flat",
    )
    job = cluster.job({"alpha": 4}, *arguments, seconds=JOB_SECONDS)
    assert job.returncode == 0, job
    return json.loads(job.out)


@pytest.mark.full
def test_reproducible_means_have_the_bits_that_they_have_on_one_host(
    world, on_one_host
):
    if len(world[0]) != len(on_one_host):
        pytest.skip("another number of ranks has other sums")
    expected = on_one_host[0]["hierarchical"]["bits"]
    assert len(set(expected)) == 2  # float16 rounds
    for mine in (*world[1], *on_one_host):
        assert {tuple(mine[name]["bits"]) for name in MEAN if name in mine} == {
            tuple(expected)
        }


def test_dummy_leaves_gradients_alone_and_the_network_too(world):
    for mine in world[1]:
        assert mine["dummy"]["wide"]["untouched"]
        assert mine["dummy"]["wide"]["sent"] < VALUES / 5


@pytest.mark.parametrize("name", EVERYWHERE)
def test_operations(world, name):
    for rank, mine in enumerate(world[1]):
        assert set(mine[name]["operations"]) == {""}
        assert mine[name]["part"] == list(range(rank % 2, len(world[0]), 2))


def test_single_node_refuses_several_and_names_one_that_serves(world):
    for mine in world[1]:
        assert "hierarchical" in mine["single_node"]["refused"]
