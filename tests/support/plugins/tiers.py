"""The tiers of the tests, and the numbers of ranks on which each runs a world test.

- The first (`make test`) has what no marker moves to another one. A case of a world test
  runs on 2 or on 3 ranks.
- The second (`make test-ci`, `pytest --ci`) has what the first leaves out: the markers `ci`
  and `alone`, the folders below, and world tests on 1 and 4 ranks.
- The full tier (`make test-full`, `pytest --full`) has everything, on all numbers of ranks;
  so has a run of pytest for tests that are named (`tests/test_x.py::test_y`).
"""

from __future__ import annotations

import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import pytest

# World tests run on these numbers of ranks: in the full tier, without a marker `ranks`
# in the others, and in the first one.
FULL_SIZES = (1, 2, 3, 4)
DEFAULT_SIZES = (2, 3)
FIRST_SIZES = {2, 3}
# Folders of the second tier: they install packages, make hosts, or start many jobs.
CI_FOLDERS = {"benchmarks", "chaos", "cluster", "compatibility", "packaging", "slurm"}
TESTS = Path(__file__).parents[2]
ALL_FOR_WORLDS = re.compile(r"^pytestmark = (\[[^]]*|)pytest\.mark\.world\b", re.M)


class Tier(Enum):
    """A tier by the option of pytest that runs it."""

    FIRST = ""
    CI = "--ci"
    FULL = "--full"


def chosen_tier(config: pytest.Config) -> Tier:
    """The tier that this run of pytest is for; all of it if a test is named."""
    if config.getoption("--full") or any("::" in word for word in config.args):
        return Tier.FULL
    if config.getoption("--ci"):
        return Tier.CI
    return Tier.FIRST


def tier_of(item: pytest.Item) -> Tier:
    """The earliest tier that has this test."""
    if item.get_closest_marker("full"):
        return Tier.FULL
    if TESTS in item.path.parents:
        folders = set(item.path.relative_to(TESTS).parts)
    else:
        folders = set()
    if item.get_closest_marker("ci") or item.get_closest_marker("alone"):
        return Tier.CI
    if CI_FOLDERS & folders:
        return Tier.CI
    return Tier.FIRST


def of_tier(items: list[pytest.Item], tier: Tier) -> set[pytest.Item]:
    """The tests without a world that a tier runs."""
    if tier is Tier.FULL:
        return set(items)
    return {item for item in items if tier_of(item) is tier}


def of_world(items: list[pytest.Item], tier: Tier, size: int) -> set[pytest.Item]:
    """The world tests that a tier runs on so many ranks."""
    if tier is Tier.FULL:
        return {item for item in items if size in possible_sizes(item)}
    sizes = sizes_of(item for item in items if tier_of(item) is not Tier.FULL)
    found = {item for item in sizes if size in sizes[item]}
    if size not in FIRST_SIZES:
        if tier is Tier.CI:
            return found
        return set()
    return {item for item in found if tier_of(item) is tier}


def possible_sizes(item: pytest.Item) -> set[int]:
    """The numbers of ranks on which the full tier runs this test."""
    sizes = item.get_closest_marker("sizes")
    asked = FULL_SIZES
    if sizes:
        asked = sizes.args
    return set(FULL_SIZES).intersection(asked)


def sizes_of(items: Iterable[pytest.Item]) -> dict[pytest.Item, set[int]]:
    """The numbers of ranks on which the first two tiers run each of these world tests.

    Each case of a test is dealt to 2 or to 3 ranks, so that each value of each parameter
    is on both if it can be. Three ranks share two cores, where a case takes more than
    twice as long, so 2 ranks get four times as many.
    """
    found = {item: _asked_sizes(item) for item in items}
    functions: dict[str, list[pytest.Item]] = {}
    for item in found:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        # Names decide between equals, so that a new test changes nothing for the others.
        if zlib.crc32(name.encode()) % 2:
            order = (2, 3)
        else:
            order = (3, 2)
        # A value, and a number of ranks that it was on.
        done: set[tuple[str, int]] = set()
        taken: Counter[int] = Counter()
        for item in cases:
            if not found[item].issuperset(order):
                continue
            values = item.name.partition("[")[2].rstrip("]").split("-")
            size = max(
                order,
                key=lambda n: (
                    sum((v, n) not in done for v in values),
                    -taken[n] * (n - 1) ** 2,
                ),
            )
            done |= {(value, size) for value in values}
            taken[size] += 1
            found[item] -= set(order) - {size}
    return found


def _asked_sizes(item: pytest.Item) -> set[int]:
    """What its markers ask for in the first two tiers: `sizes` says where it makes sense."""
    ranks = item.get_closest_marker("ranks")
    possible = possible_sizes(item)
    asked = DEFAULT_SIZES
    if ranks:
        asked = ranks.args
    return possible.intersection(asked) or possible


@functools.cache
def only_elsewhere(path: Path, world: bool) -> bool:
    """Whether a file's text says that all its tests are for worlds, or in a world, that none is."""
    text = path.read_text()
    if world:
        return not re.search(r"\bmark\.world\b", text)
    return bool(ALL_FOR_WORLDS.search(text))
