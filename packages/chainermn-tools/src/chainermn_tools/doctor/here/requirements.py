"""Compares what installed distributions say that they need with what is installed.

What can't be read isn't judged, so that it never complains for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

# Chainer names setuptools, of which it wants a module that `_chainermn_startup` replaces.
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
    waiting, seen = [str(canonicalize_name(name)) for name in roots], set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for requirement in _needed(requires(name)):
            needed = canonicalize_name(requirement.name)
            if (name, needed) in NOT_NEEDED:
                continue
            installed = version(needed)
            if installed is None or not fits(installed, requirement):
                found.append((name, f"{requirement.name}{requirement.specifier}", installed))
            if installed is not None:
                waiting.append(needed)
    return found


def fits(version: str, requirement: Requirement) -> bool:
    """Whether a version meets a requirement; so it does where nobody can tell."""
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _needed(lines: Iterable[str]) -> Iterable[Requirement]:
    """The requirements that hold here, without extras."""
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement
