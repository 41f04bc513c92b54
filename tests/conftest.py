"""The tiers of the tests, the ranks of a world, and what every test must do: check something.

`pytest` runs the tests without the marker `world`; `mpiexec -n N pytest --world` those
with it, on the numbers of ranks that tests/support/plugins/world.py says. `--full` runs the
full tier.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import hypothesis
import pytest

from tests.support.plugins import checks
from tests.support.plugins.world import World, only_elsewhere, possible_sizes, sizes_of

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--world", action="store_true", help="run the tests marked `world`"
    )
    parser.addoption("--full", action="store_true", help="run the full tier")


def pytest_configure(config: pytest.Config) -> None:
    world = config.getoption("--world")
    if world:
        config.pluginmanager.register(World(), "chainermn-world")
    config.pluginmanager.register(checks.Plugin(world), "chainermn-checks")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file whose tests all run elsewhere: on two cores, four ranks take long to."""
    if not fnmatch(collection_path.name, "test_*.py"):
        return None
    return only_elsewhere(collection_path, config.getoption("--world")) or None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    world, full = config.getoption("--world"), config.getoption("--full")
    nowhere = [item.nodeid for item in items if not possible_sizes(item)]
    if nowhere:
        raise pytest.UsageError(
            f"on no number of ranks that the full tier has: {nowhere}"
        )
    elsewhere = [
        item
        for item in items
        if (item.get_closest_marker("world") is not None) != world
    ]
    unseen = {item.path for item in elsewhere if only_elsewhere(item.path, not world)}
    if unseen:
        raise pytest.UsageError(f"nowhere are all tests of these collected: {unseen}")
    of_tier = [
        item for item in items if full or item.get_closest_marker("full") is None
    ]
    wanted = set(of_tier).difference(elsewhere)
    if world:
        size = config.pluginmanager.getplugin("chainermn-world").size
        sizes = sizes_of([item for item in of_tier if item in wanted], full)
        wanted = {item for item in wanted if size in sizes[item]}
    unwanted = [item for item in items if item not in wanted]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item in wanted]


@pytest.fixture
def world():
    """MPI.COMM_WORLD."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
