"""The model of cost: what it counts is what is sent, and the figures that it gives are kept."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from tests.benchmarks.counted_messages import counted_messages
from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT
from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import on_nodes

SIZE = 400_003  # of float32: more than is gathered, and some chunks
CHUNKS = {"default": None, "small": 64 << 10}
# Name of the communicator and ranks a node.
APART = pytest.mark.sizes(2, 3, 4)
PAIRS = [pytest.mark.sizes(4), pytest.mark.ranks(4)]
CASES = [
    *(pytest.param(name, 1, marks=APART) for name in ("naive", "flat", "hierarchical")),
    *(
        pytest.param(name, 2, marks=PAIRS)
        for name in ("hierarchical", "two_dimensional")
    ),
]


@pytest.fixture
def simulated(load):
    """The module that simulates."""
    return load("simulated")


@pytest.mark.world
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("in_rounds", [False, True])
@pytest.mark.parametrize(("name", "ranks_a_node"), CASES)
def test_messages_and_bytes_are_those_of_the_real_run(
    world, simulated, name, ranks_a_node, in_rounds, chunks
):
    nodes = world.size // ranks_a_node
    of_each = [rank // ranks_a_node for rank in range(world.size)]
    chunk_bytes = CHUNKS[chunks]
    with by_circulant() if in_rounds else contextlib.nullcontext():
        with on_nodes(of_each, name) as comm:
            comm.set_config("chunk_bytes", chunk_bytes)
            model = with_grads(w=np.full(SIZE, world.rank, "f4"))
            with counted_messages() as counts:
                comm.allreduce_grad(model)
        np.testing.assert_array_equal(model["w"].grad, (world.size - 1) / 2)
        found = simulated.simulate(
            name,
            nodes,
            4 * SIZE,
            simulated.LINK_25G,
            ranks_a_node,
            chunk_bytes,
            node=of_each[world.rank],
        )
    if world.rank % ranks_a_node == 0:  # the first of its node is simulated
        assert counts.messages == found.messages > 0
        assert (counts.sent, counts.received) == (found.sent, found.received)
    elif name == "hierarchical":
        assert counts.messages == 0


@pytest.mark.parametrize(
    ("nodes", "most"), [(2, 1.05), (16, 1.1), (128, 1.2), (1024, 1.5)]
)
@pytest.mark.parametrize("name", ["flat", "hierarchical"])
def test_a_mean_of_102_mb_takes_little_more_than_its_bytes(
    simulated, name, nodes, most
):
    nbytes, link = 102_228_128, simulated.LINK_25G
    limit = simulated.bandwidth_limit(nodes, nbytes, link)
    assert limit <= simulated.slowest(name, nodes, nbytes, link) <= most * limit


@pytest.mark.parametrize(("nodes", "most"), [(17, 3), (128, 2.6), (1024, 2.5)])
def test_a_small_mean_takes_few_rounds(simulated, nodes, most):
    link = simulated.LINK_25G
    tree = simulated.tree_latency(nodes, link)
    assert tree < simulated.slowest("flat", nodes, 100_000, link) <= most * tree


def test_costs_are_those_of_a_model_by_hand(simulated):
    """Two ranks swap halves and sum, and then swap sums."""
    constants = simulated.Constants(1e-3, 1e6, message=0, memory=1e6, barrier=0)
    half = 300_000  # bytes; more than is gathered, less than a round
    counts = simulated.simulate("flat", 2, 2 * half, constants)
    swap = half / constants.bandwidth + constants.latency
    expected = 2 * swap + 3 * half / constants.memory
    assert counts.seconds == pytest.approx(expected)
    assert (counts.messages, counts.sent, counts.received) == (2, 2 * half, 2 * half)


@pytest.mark.parametrize("what", ["latency", "message", "barrier"])
def test_what_costs_more_takes_longer(simulated, what):
    link = simulated.LINK_25G
    dearer = replace(link, **{what: 100 * getattr(link, what)})
    times = [
        simulated.simulate("hierarchical", 20, 1_000_000, each, ranks_a_node=2).seconds
        for each in (link, dearer)
    ]
    assert times[0] < times[1]


def test_what_can_not_be_simulated_is_refused(simulated):
    for name, nodes, nbytes, ranks in (
        ("flat", 1, 99, 1),
        ("flat", 4, 8, 1),
        ("flat", 4, 800, 2),
    ):
        with pytest.raises(ValueError, match="simulated"):
            simulated.simulate(name, nodes, nbytes, simulated.LINK_25G, ranks)


@pytest.mark.parametrize("option", ["--gigabits=0", "--microseconds=-1"])
def test_a_link_that_can_not_be_is_refused(tmp_path, option):
    files = "--json", tmp_path / "all.json", "--plot", tmp_path / "all.png"
    done = commands.run(
        sys.executable, ROOT / "benchmarks" / "scaling.py", option, *files
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--gigabits must be more than 0" in done.stderr


def test_what_was_measured_over_hosts_is_judged_round_by_round(load):
    cases = [
        {"name": "MPI_Allreduce", "kind": "mpi", "ms": [100.0, 200.0, 300.0]},
        {"name": "flat", "kind": "ours", "ms": [90.0, 220.0, 290.0]},
        {"name": "hierarchical", "kind": "ours", "ms": [110.0, 220.0, 100.0]},
    ]
    found = list(load("scaling").measured_limits({"means": {"8": cases}}))
    assert [(one["limit"].split(":")[0], one["ok"]) for one in found] == [
        ("8 hosts, flat", True),
        ("8 hosts, hierarchical", False),
    ]
    assert list(load("scaling").measured_limits({})) == []


@pytest.mark.full
def test_the_program_prints_the_figures_and_draws_them(tmp_path):
    files = "--json", tmp_path / "all.json", "--plot", tmp_path / "all.png"
    script = ROOT / "benchmarks" / "scaling.py"
    unmeasured = "--measured", tmp_path / "none"
    done = commands.run(sys.executable, script, *unmeasured, *files, seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "all.json").read_text())
    assert all(one["ok"] for one in found["limits"])
    assert {row["nodes"] for row in found["nodes"]} >= {2, 16, 128, 1024}
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
