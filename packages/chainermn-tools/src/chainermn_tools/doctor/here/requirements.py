"""Compares what installed distributions say that they need with what is installed.

It knows as much of requirements as it takes to be sure; what it can't read, or what depends on
the environment by a marker, it doesn't judge, so that it never complains for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from _chainermn_requirements import OPERATORS, release

# `numpy>=1.26,<3` or `numpy (>=1.26)`, and after `;` when it is needed.
REQUIREMENT = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?(?P<conditions>[^;()]*)\)?\s*(?:;(?P<marker>.*))?"
)
CONDITION = re.compile(r"\s*(~=|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?\s*")
# Chainer names setuptools, of which it wants a module that `_chainermn_requirements` replaces.
NOT_NEEDED = {("chainer", "setuptools")}


def misfits(
    roots: Iterable[str],
    version: Callable[[str], str | None],
    requires: Callable[[str], Iterable[str]],
) -> list[tuple[str, str, str | None]]:
    """What doesn't fit among distributions and all that they need, directly or not.

    Args:
        roots: names of installed distributions.
        version: gives a distribution's version, None when it is not installed.
        requires: gives an installed distribution's requirements.

    Returns:
        For each misfit who requires, what, and which version is installed.
    """
    found: list[tuple[str, str, str | None]] = []
    waiting, seen = [normal(name) for name in roots], set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for requirement in requires(name):
            match = REQUIREMENT.fullmatch(requirement)
            if match is None or "extra" in (match["marker"] or ""):
                continue
            needed = normal(match["name"])
            if (name, needed) in NOT_NEEDED:
                continue
            installed = version(needed)
            wanted = match["name"] + match["conditions"].strip()
            if installed is None:
                if match["marker"] is None:
                    found.append((name, wanted, None))
                continue
            if match["marker"] is None and not fits(installed, match["conditions"]):
                found.append((name, wanted, installed))
            waiting.append(needed)
    return found


def fits(version: str, conditions: str) -> bool:
    """Whether a version meets conditions such as ``>=1.26,<3``; so it does where they are unclear.

    Suffixes such as ``rc1`` don't count.
    """
    try:
        mine = release(version)
    except ValueError:
        return True
    for condition in filter(None, (one.strip() for one in conditions.split(","))):
        match = CONDITION.fullmatch(condition)
        if match is not None and not _meets(mine, *match.groups()):
            return False
    return True


def normal(name: str) -> str:
    """A distribution's name as installers compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _meets(mine: tuple[int, ...], sign: str, wanted: str, star: str | None) -> bool:
    numbers = tuple(map(int, wanted.split(".")))
    if star is not None:
        padded = mine + (0,) * (len(numbers) - len(mine))
        return (padded[: len(numbers)] == numbers) == (sign == "==")
    if sign == "~=":
        prefix = numbers[:-1]
        padded = mine + (0,) * (len(prefix) - len(mine))
        return mine >= release(wanted) and padded[: len(prefix)] == prefix
    return OPERATORS[sign](mine, release(wanted))
