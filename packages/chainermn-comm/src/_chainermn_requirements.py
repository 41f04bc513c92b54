"""The five names of `pkg_resources` that Chainer uses, for environments that lack it.

Knows requirements as Chainer writes them: a name, and release numbers after `==`, `!=`, `<`,
`<=`, `>`, `>=`, separated by commas. A suffix such as `rc1` doesn't count in comparisons.
"""

import operator
import re
from importlib import metadata

OPERATORS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class ResolutionError(Exception):
    """A requirement is not met."""


class DistributionNotFound(ResolutionError):
    """Its distribution is not installed."""


class VersionConflict(ResolutionError):
    """Its distribution is installed in another version."""


def get_distribution(name):
    """What is known of the installed distribution `name`: its `version`, for one."""
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise DistributionNotFound(name) from None


def release(version):
    """`1.10.0rc1` as (1, 10): trailing zeros say nothing."""
    numbers = [int(n) for n in re.match(r"[\d.]*\d|", version).group().split(".") if n]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def require(*requirements):
    """Raise a ResolutionError unless all requirements are met."""
    for requirement in requirements:
        name, conditions = re.fullmatch(r"\s*([\w.-]+)\s*(.*)", requirement).groups()
        installed = get_distribution(name).version
        for condition in filter(None, conditions.split(",")):
            sign, version = re.fullmatch(r"\s*([=!<>]=?)\s*([\w.]+)\s*", condition).groups()
            if not OPERATORS[sign](release(installed), release(version)):
                raise VersionConflict(f"{requirement} is required, {installed} is installed")


class WorkingSet:
    """What is installed."""

    require = staticmethod(require)
