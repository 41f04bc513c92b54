"""Checks of Python, of what is installed, and of what `import chainermn` and `chainer` give."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from chainermn_tools import environment
from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, skipped, warning
from chainermn_tools.doctor.hints import hint_for_error
from chainermn_tools.environment import OUR_PACKAGES
from chainermn_tools.jobs import Unavailable

OLDEST, NEWEST = (3, 10), (3, 13)
FACADE = "chainermn_facade"
INSTALL_ALL = "install ChainerMN's packages together, from its repository or its wheels"
# Chainer names setuptools, of which it wants a module that `_chainermn_startup` replaces.
NOT_NEEDED = {("chainer", "setuptools")}

checks = Checks()


def installed_versions(context: Context) -> dict[str, str | None]:
    """Return the versions of the distributions that matter; None for one that is missing."""
    return environment.package_versions()


@checks.add("python", "Is this Python one that ChainerMN was made for?")
def python(context: Context) -> CheckResult:
    version, here = sys.version_info[:2], f"{platform.python_version()}, {sys.executable}"
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if platform.system() != "Linux":
        return failed(
            f"{here} on {platform.system()}", "use Linux: ChainerMN was made for it alone"
        )
    if platform.python_implementation() != "CPython":
        return failed(f"{here} is {platform.python_implementation()}", f"use CPython {span}")
    if version < OLDEST:
        return failed(here, f"use Python {span}")
    if version > NEWEST:
        return warning(f"{here} is newer than what was tested, {span}", f"use Python {span}")
    return ok(here)


@checks.add("packages", "Are the packages there that the installed ones need, in fitting versions?")
def packages(context: Context) -> CheckResult:
    versions = context.cached(installed_versions)
    missing = unsatisfied_requirements(name for name in OUR_PACKAGES if versions[name] is not None)
    cupys = sorted(name for name, v in versions.items() if name.startswith("cupy") and v)
    if missing:
        message = "; ".join(
            f"{who} needs {what}, {'which is missing' if version is None else f'not {version}'}"
            for who, what, version in missing
        )
        return failed(message, _install_command(missing[0][1]))
    if len(cupys) > 1:
        return warning(
            f"several packages hold one and the same cupy: {', '.join(cupys)}",
            f"pip uninstall -y {' '.join(cupys)}   # then install the one for your CUDA again",
        )
    shown = (*OUR_PACKAGES, "chainer", "numpy", "mpi4py")
    return ok(", ".join(f"{name} {versions[name]}" for name in shown if versions[name]))


def unsatisfied_requirements(roots: Iterable[str]) -> list[tuple[str, str, str | None]]:
    """Find what is missing among the requirements of distributions, direct or not.

    What can't be parsed isn't judged.

    Args:
        roots: names of installed distributions.

    Returns:
        For each unsatisfied requirement who has it, what it is, and which version is installed.
    """
    unsatisfied: list[tuple[str, str, str | None]] = []
    waiting, seen = [str(canonicalize_name(name)) for name in roots], set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for requirement in _requirements(name):
            needed = canonicalize_name(requirement.name)
            if (name, needed) in NOT_NEEDED:
                continue
            installed = _installed_version(needed)
            if installed is None or not _satisfies(installed, requirement):
                what = f"{requirement.name}{requirement.specifier}"
                unsatisfied.append((name, what, installed))
            if installed is not None:
                waiting.append(needed)
    return unsatisfied


def _requirements(name: str) -> Iterable[Requirement]:
    """Yield the requirements of an installed distribution that hold here, without extras."""
    for line in metadata.requires(name) or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _satisfies(version: str, requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name) or "unknown"
    except metadata.PackageNotFoundError:
        return None
    except KeyError:  # an interrupted installation leaves metadata without a version
        return "unknown"


def _install_command(requirement: str) -> str:
    """Return how to get what is missing; the public index's `chainermn` is another one."""
    if canonicalize_name(requirement).startswith("chainermn"):
        return INSTALL_ALL
    return f"{sys.executable} -m pip install '{requirement}'"


@checks.add(
    "import chainermn", "Does `import chainermn` give this project, and not Chainer's old copy?"
)
def import_chainermn(context: Context) -> CheckResult:
    found = environment.call_in_subprocess(environment.import_origins, context.program_timeout())
    origin, finder = found["chainermn"], found["finder"]
    version = context.cached(installed_versions)["chainermn"]
    if version is None or version.startswith("1."):
        if origin is None:
            return skipped("the meta-package chainermn is not installed, only parts of it")
        return failed(
            f"it gives {origin}, since the package of this project is missing", INSTALL_ALL
        )
    if origin is not None and FACADE in origin:
        return ok(f"it gives {origin}; the start-up finder is {finder}")
    if os.environ.get("CHAINERMN_USE_BUNDLED") == "1":
        message = f"CHAINERMN_USE_BUNDLED is 1, so it gives {origin}"
        return warning(message, "unset CHAINERMN_USE_BUNDLED")
    if finder != "registered":
        return failed(
            f"it gives {origin}, since the start-up finder didn't run: Python reads .pth files of "
            "its environment's own folders alone, not of --target or PYTHONPATH, nor with -S",
            "install with pip into an environment, or write `import chainermn_comm` before "
            "`import chainermn`",
        )
    return failed(f"it gives {origin}", INSTALL_ALL)


@checks.add("import chainer", "Can Chainer be imported?", needs=("packages",))
def import_chainer(context: Context) -> CheckResult:
    if context.cached(installed_versions)["chainer"] is None:
        return skipped("Chainer is not installed")
    try:
        return ok(environment.call_in_subprocess(chainer_version, context.program_timeout()))
    except Unavailable as error:
        hint = "unset CHAINERMN_NO_COMPAT: it keeps Chainer from being repaired as it is imported"
        if os.environ.get("CHAINERMN_NO_COMPAT") != "1":
            hint = hint_for_error(error, f"see what fails: {sys.executable} -c 'import chainer'")
        return failed(str(error), hint)


def chainer_version() -> str:
    """Return Chainer's version once it is imported. Call it in a subprocess."""
    import chainer
    import numpy

    return f"Chainer {chainer.__version__} on NumPy {numpy.__version__}"
