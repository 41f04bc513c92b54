"""The five names of `pkg_resources` that Chainer uses, for environments that lack it.

Knows requirements as Chainer writes them: a name, and release numbers after `==`, `!=`, `<`,
`<=`, `>`, `>=`, separated by commas. A suffix such as `rc1` doesn't count in comparisons.
"""

import re
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne

OPERATORS = {"==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}


class ResolutionError(Exception):
    """A requirement is not met."""


class DistributionNotFound(ResolutionError):
    """Its distribution is not installed."""


class VersionConflict(ResolutionError):
    """Its distribution is installed in another version."""


def get_distribution(name: str) -> metadata.Distribution:
    """What is known of the installed distribution `name`: its `version`, for one."""
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise DistributionNotFound(name) from None


def match(pattern: str, text: str) -> tuple[str, ...]:
    found = re.fullmatch(pattern, text)
    if found is None:
        raise ValueError(f"cannot read {text!r} in a requirement of Chainer's")
    return found.groups()


def release(version: str) -> tuple[int, ...]:
    """`1.10.0rc1` as (1, 10): trailing zeros say nothing."""
    numbers, _ = match(r"(\d+(?:\.\d+)*)(.*)", version)
    return tuple(map(int, re.sub(r"(\.0)+$", "", numbers).split(".")))


def require(*requirements: str) -> None:
    """Raise a ResolutionError unless all requirements are met."""
    for requirement in requirements:
        name, conditions = match(r"\s*([\w.-]+)\s*(.*)", requirement)
        installed = get_distribution(name).version
        for condition in filter(None, conditions.split(",")):
            sign, version = match(r"\s*(==|!=|[<>]=?)\s*([\w.]+)\s*", condition)
            if not OPERATORS[sign](release(installed), release(version)):
                raise VersionConflict(f"{requirement} is required, {installed} is installed")


class WorkingSet:
    """What is installed."""

    require = staticmethod(require)
