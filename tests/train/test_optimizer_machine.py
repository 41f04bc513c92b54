"""Whatever happens to an optimizer of all ranks, in whatever order, ranks stay alike or say why."""

from __future__ import annotations

import os
import secrets
from functools import partial

import pytest

from tests.support.training.exchanges import KINDS
from tests.train.optimizer_machine.drawn import lead

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]

# By number of ranks: sequences of a kind in the first tiers, and of a test in the full
# one, which has so many tests of each kind.
SEQUENCES = {2: 24, 3: 8}
MANY = {2: 70, 3: 35}
TESTS = 10


def play_from_seed(play, kind, seed, count):
    """CHAINERMN_TEST_SEED repeats a failure."""
    seed = int(os.environ.get("CHAINERMN_TEST_SEED", seed))
    failure = play.run(partial(lead, kind=kind, seed=seed, count=count))
    assert not failure, f"CHAINERMN_TEST_SEED={seed}: {failure}"


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_alike_whatever_happens(world, play, kind):
    play_from_seed(play, kind, world.size, SEQUENCES[world.size])


@pytest.mark.full
@pytest.mark.parametrize("number", range(TESTS))
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_stay_alike_in_many_sequences(world, play, kind, number):
    """With another seed each time."""
    seed = world.bcast(secrets.randbelow(2**32))
    play_from_seed(play, kind, seed, MANY[world.size])
