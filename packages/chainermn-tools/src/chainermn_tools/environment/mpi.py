"""Which MPI the programs are linked to, which `mpiexec` would start them, and if the two fit."""

from __future__ import annotations

import shutil
from typing import Any

from chainermn_tools.environment import probe
from chainermn_tools.jobs import find_launcher


def mpi(seconds: float) -> dict[str, Any]:
    """The library that mpi4py loads, the launcher on PATH, and whether they belong together.

    Also the compiler on PATH, with which an mpi4py from source would be built; None without one.
    """
    found = probe.run_concurrently(
        {
            "library": lambda: probe.call_in_subprocess(library, seconds),
            "launcher": lambda: find_launcher(seconds),
        },
        seconds + probe.MARGIN_SECONDS,
    )
    reason = mismatch(found["library"], found["launcher"])
    known = "vendor" in found["library"] and found["launcher"].get("vendor") is not None
    match = reason is None if known else probe.unavailable("one of the two is unknown")
    return {**found, "match": match, "mismatch": reason, "mpicc": shutil.which("mpicc")}


def library() -> dict[str, Any]:
    """The MPI library, asked without MPI_Init, which may hang. Call it in a child process."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "standard": ".".join(map(str, MPI.Get_version())),
        "module": MPI.__file__,
        "description": MPI.Get_library_version().rstrip("\0").split("\n"),
    }


def mismatch(library: dict[str, Any], launcher: dict[str, Any]) -> str | None:
    """Why the launcher cannot start the library's programs; None when it can, or if unknown.

    Started by another vendor's `mpiexec`, each process thinks that it is rank 0 of 1. So it
    is with Open MPI when the major versions differ. Hydra also starts MVAPICH's programs.
    """
    if "unavailable" in library or "unavailable" in launcher or not launcher["vendor"]:
        return None
    theirs, ours = launcher["vendor"], library["vendor"]
    hydra = theirs in ("MPICH", "MVAPICH") and ours.startswith(("MPICH", "MVAPICH"))
    if not hydra and theirs != ours:
        return f"mpi4py loads {ours} but {launcher['path']} is {theirs}'s"
    majors = [str(one["version"]).split(".")[0] for one in (library, launcher)]
    if ours == "Open MPI" and launcher["version"] and majors[0] != majors[1]:
        return (
            f"mpi4py loads Open MPI {library['version']} "
            f"but {launcher['path']} is of {launcher['version']}"
        )
    return None
