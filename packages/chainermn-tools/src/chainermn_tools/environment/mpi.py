"""The MPI that mpi4py loads, the `mpiexec` on PATH, and where its ranks run."""

from __future__ import annotations

from typing import Any

from chainermn_tools import jobs
from chainermn_tools.environment import probe


def mpi(timeout: float) -> dict[str, Any]:
    """Return what is known of the library and the launcher, and whether they match."""
    probes = {
        "library": lambda: probe.call_in_subprocess(mpi_library, timeout),
        "launcher": lambda: jobs.find_launcher(timeout),
    }
    found = probe.run_concurrently(probes, probe.MARGIN * timeout)
    return {**found, "mismatch": mpi_mismatch(found["library"], found["launcher"])}


def mpi_library() -> dict[str, Any]:
    """Return facts about the MPI that mpi4py loads, such as its vendor. Call it in a subprocess."""
    import mpi4py

    mpi4py.rc.initialize = False  # MPI_Init may hang
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return {
        "vendor": vendor,
        "version": ".".join(map(str, version)),
        "module": MPI.__file__,
        "description": MPI.Get_library_version().rstrip("\0").split("\n"),
    }


def mpi_mismatch(library: dict[str, Any], launcher: dict[str, Any]) -> str | None:
    """Return why the launcher cannot start the library's programs; None if it can, or if unknown.

    Started by another vendor's `mpiexec`, each process thinks that it is rank 0 of 1.
    The same happens with Open MPI if the major versions differ. Hydra also starts
    MVAPICH's programs.
    """
    if "unavailable" in library or "unavailable" in launcher or not launcher["vendor"]:
        return None
    theirs, ours = launcher["vendor"], library["vendor"]
    are_hydra = theirs in ("MPICH", "MVAPICH") and ours.startswith(("MPICH", "MVAPICH"))
    path = launcher["path"]
    if not are_hydra and theirs != ours:
        return f"mpi4py loads {ours} but {path} is {theirs}'s"
    majors = [str(one["version"]).split(".")[0] for one in (library, launcher)]
    if ours == "Open MPI" and launcher["version"] and majors[0] != majors[1]:
        return f"mpi4py loads Open MPI {library['version']} but {path} is of {launcher['version']}"
    return None


def topology(timeout: float) -> dict[str, Any]:
    """Return the ranks that a launcher started, and their nodes (collective).

    MPI is called in a subprocess, which takes this process's place as a rank, because
    an MPI that can't start ends its process or hangs. Then, and on all ranks but 0,
    Unavailable is raised.
    """
    return probe.call_in_subprocess(gather_ranks, timeout)


def gather_ranks() -> dict[str, Any] | None:
    """Gather every rank's node, host and cores at rank 0, and finalize MPI (collective).

    Return a dict for the report at rank 0, None elsewhere.
    """
    from mpi4py import MPI

    from chainermn_comm.topology import Topology

    world = MPI.COMM_WORLD
    level = thread_level()
    nodes = Topology.discover(world).nodes
    mine = {
        "rank": world.rank,
        "node": nodes[world.rank],
        "host": MPI.Get_processor_name(),
        "cores": jobs.available_cores()["usable"],
    }
    ranks = world.gather(mine)
    MPI.Finalize()
    if ranks is None:
        return None
    return {
        "size": len(ranks),
        "nodes": len(set(nodes)),
        "thread_level": level,
        "ranks": ranks,
    }


def thread_level() -> str:
    """Return the thread level that MPI provides, such as "multiple". MPI must be initialized."""
    from mpi4py import MPI

    levels = ("single", "funneled", "serialized", "multiple")
    provided = MPI.Query_thread()
    return next(
        one for one in levels if getattr(MPI, f"THREAD_{one.upper()}") == provided
    )
