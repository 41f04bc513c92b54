"""Which tests a run has, on which ranks, and what every test must do: check something.

`pytest` runs the tests without the marker `world`; `mpiexec -n N pytest --world` those with
it. tests/support/plugins/tiers.py says which belong to the first tier, which to the second
(`--ci`), and on how many ranks.
"""

from __future__ import annotations

from fnmatch import fnmatch

import hypothesis
import pytest

from tests.support.plugins import checks, tiers
from tests.support.plugins.world import World

# One profile: no deadline, since a busy machine is no failure; the same examples each
# time and on all ranks, so that a failure is seen again.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")
checks.install()


def pytest_addoption(parser):
    parser.addoption(
        "--world", action="store_true", help="run the tests marked `world`"
    )
    parser.addoption("--ci", action="store_true", help="run the second tier")
    parser.addoption("--full", action="store_true", help="run everything")


def pytest_configure(config):
    world = config.getoption("--world")
    if world:
        config.pluginmanager.register(World(), "chainermn-world")
    config.pluginmanager.register(checks.Plugin(world), "chainermn-checks")


def pytest_ignore_collect(collection_path, config):
    """Import no file whose tests all run elsewhere: on two cores, four ranks take long to."""
    if not fnmatch(collection_path.name, "test_*.py"):
        return None
    return tiers.only_elsewhere(collection_path, config.getoption("--world")) or None


def pytest_collection_modifyitems(config, items):
    world = config.getoption("--world")
    nowhere = [item.nodeid for item in items if not tiers.possible_sizes(item)]
    if nowhere:
        raise pytest.UsageError(
            f"on no number of ranks that the full tier has: {nowhere}"
        )
    in_worlds = [item for item in items if item.get_closest_marker("world")]
    outside = [item for item in items if not item.get_closest_marker("world")]
    elsewhere = in_worlds
    if world:
        elsewhere = outside
    unseen = {
        item.path for item in elsewhere if tiers.only_elsewhere(item.path, not world)
    }
    if unseen:
        raise pytest.UsageError(f"nowhere are all tests of these collected: {unseen}")

    tier = tiers.chosen_tier(config)
    if world:
        size = config.pluginmanager.getplugin("chainermn-world").size
        wanted = tiers.of_world(in_worlds, tier, size)
    else:
        wanted = tiers.of_tier(outside, tier)
    unwanted = [item for item in items if item not in wanted]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item in wanted]


@pytest.fixture
def world():
    """MPI.COMM_WORLD."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
