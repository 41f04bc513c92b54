"""The tiers of the tests, the ranks of a world, and what every test must do: check something.

`pytest` runs the tests without the marker `world`; `mpiexec -n N pytest --world` those with it, on
the numbers of ranks that tests/support/world.py says. `--full` runs the full tier.
"""

from __future__ import annotations

import hypothesis
import pytest

from tests.support import checks
from tests.support.world import World, possible_sizes, runs_on

# One profile: no deadline, since a busy machine is no failure; the same examples each time and on
# all ranks, so that a failure is seen again.
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
    parser.addoption("--world", action="store_true", help="run the tests marked `world`")
    parser.addoption("--full", action="store_true", help="run the full tier")


def pytest_configure(config: pytest.Config) -> None:
    world = config.getoption("--world")
    if world:
        config.pluginmanager.register(World(), "chainermn-world")
    config.pluginmanager.register(checks.Plugin(world), "chainermn-checks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    world, full = config.getoption("--world"), config.getoption("--full")
    size = config.pluginmanager.getplugin("chainermn-world").size if world else 1
    nowhere = [item.nodeid for item in items if not possible_sizes(item)]
    if nowhere:
        raise pytest.UsageError(f"on no number of ranks that the full tier has: {nowhere}")

    def wanted(item: pytest.Item) -> bool:
        return (
            (item.get_closest_marker("world") is not None) == world
            and (not world or runs_on(item, size, full))
            and (full or item.get_closest_marker("full") is None)
        )

    unwanted = [item for item in items if not wanted(item)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if wanted(item)]


@pytest.fixture
def world():
    """MPI.COMM_WORLD."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
