"""The five names of `pkg_resources` that Chainer uses, for environments that lack it."""

from importlib.metadata import PackageNotFoundError as DistributionNotFound
from importlib.metadata import distribution as get_distribution

from packaging.requirements import Requirement


class VersionConflict(Exception):
    """A distribution is installed in another version than is required."""


# Chainer catches this error, and never raises it.
ResolutionError = (DistributionNotFound, VersionConflict)


def require(*requirements: str) -> None:
    """Raise unless all requirements are met; what they require themselves isn't looked at."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        installed = get_distribution(requirement.name).version
        if not requirement.specifier.contains(installed, prereleases=True):
            raise VersionConflict(f"{text} is required, {installed} is installed")


class WorkingSet:
    """The packages that are installed."""

    require = staticmethod(require)
