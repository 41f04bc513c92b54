"""The simulated means send what real ones send, and the figures that they give are kept."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.benchmarks.counted_messages import counted_messages
from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT, imported
from tests.support.worlds.circulant import by_circulant
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import on_nodes

SIZE = 400_003  # of float32: more than is gathered, and some chunks
SCRIPT = ROOT / "benchmarks" / "scaling.py"
# Name of the communicator and ranks a node.
APART = pytest.mark.sizes(2, 3, 4)
PAIRS = [pytest.mark.sizes(4), pytest.mark.ranks(4)]
CASES = [
    pytest.param("naive", 1, marks=APART),
    pytest.param("flat", 1, marks=APART),
    pytest.param("hierarchical", 1, marks=APART),
    pytest.param("hierarchical", 2, marks=PAIRS),
    pytest.param("two_dimensional", 2, marks=PAIRS),
]


@pytest.mark.world
@pytest.mark.parametrize("chunk_bytes", [None, 64 << 10])
@pytest.mark.parametrize("many", [False, True], ids=["pairwise", "circulant"])
@pytest.mark.parametrize(("name", "ranks_a_node"), CASES)
def test_messages_and_bytes_are_those_of_the_real_run(
    world, name, ranks_a_node, many, chunk_bytes
):
    nodes = [rank // ranks_a_node for rank in range(world.size)]
    model = with_grads(w=np.full(SIZE, world.rank, "f4"))
    with contextlib.ExitStack() as stack:
        if many:
            stack.enter_context(by_circulant())
        scaling = stack.enter_context(imported(SCRIPT))
        with on_nodes(nodes, name) as comm, counted_messages() as counts:
            comm.set_config("chunk_bytes", chunk_bytes)
            comm.allreduce_grad(model)
        found = scaling.simulate(
            name,
            world.size // ranks_a_node,
            4 * SIZE,
            scaling.LINK_25G,
            ranks_a_node,
            chunk_bytes,
            node=nodes[world.rank],
        )
    assert_array_equal(model["w"].grad, (world.size - 1) / 2)
    if world.rank % ranks_a_node == 0:  # the first of its node is simulated
        assert counts["messages"] > 0
        assert counts.items() <= vars(found).items()


def test_costs_are_those_of_a_model_by_hand():
    """Two ranks swap halves and sum, and then swap sums."""
    half = 300_000  # bytes; more than is gathered, less than a round
    with imported(SCRIPT) as scaling:
        constants = scaling.Constants(1e-3, 1e6, message=0, memory=1e6, barrier=0)
        counts = scaling.simulate("flat", 2, 2 * half, constants)
    swap = half / constants.bandwidth + constants.latency
    assert counts.seconds == pytest.approx(2 * swap + 3 * half / constants.memory)


def test_the_limits_of_the_program_are_kept():
    done = commands.run(sys.executable, SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == 7
    assert "hierarchical, 4 a node, 1024 nodes" in done.stdout
