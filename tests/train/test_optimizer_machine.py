"""Whatever happens to an optimizer of all ranks, in whatever order, ranks stay alike or say why."""

from __future__ import annotations

import os

import pytest

from tests.support.training.exchanges import HIERARCHICAL, KINDS
from tests.train.optimizer_machine.lockstep import chosen_seed
from tests.train.optimizer_machine.machine import play

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3), HIERARCHICAL]

# By number of ranks: sequences of a kind in the first tiers, and of all kinds in the
# full one.
SEQUENCES, MANY = {2: 36, 3: 11}, {2: 2000, 3: 1000}


@pytest.fixture
def stderr(request):
    """Where ranks write what nobody captures."""
    return request.config.pluginmanager.getplugin("chainermn-world").stderr


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_alike_whatever_happens(world, comm, stderr, kind):
    failure = play(
        world, comm, stderr, kind, chosen_seed(world.size), SEQUENCES[world.size]
    )
    assert not failure, failure


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_alike_in_many_sequences(world, comm, stderr, kind):
    """With another seed each time; CHAINERMN_TEST_SEED repeats one."""
    seed, count = chosen_seed(), -(-MANY[world.size] // len(KINDS))
    if world.rank == 0:
        os.write(stderr, f"\n--- {kind}: CHAINERMN_TEST_SEED={seed}\n".encode())
    failure = play(world, comm, stderr, kind, seed, count)
    assert not failure, failure
