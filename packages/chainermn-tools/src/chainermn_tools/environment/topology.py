"""Which rank sits on which node, as MPI sees it.

Under `mpiexec` these are the ranks that it started; else two ranks are started to see.
"""

from __future__ import annotations

from typing import Any

from chainermn_tools import jobs
from chainermn_tools.environment import probe
from chainermn_tools.jobs import (
    available_cores,
    mpiexec_command,
    mpiexec_path,
    rank_from_env,
)

# As few as can show that ranks find one another.
TRIAL_RANKS = 2


def topology(seconds: float) -> dict[str, Any]:
    """The ranks and their nodes (collective if a launcher started this process).

    MPI is called in a child process, which under a launcher takes this one's place as a rank:
    where MPI can't start, it ends its process or hangs.

    Args:
        seconds: limit of the ranks.

    Returns:
        The number of ranks and nodes, what MPI says of itself once it runs (thread level,
        whether it takes GPU memory), and a dict for each rank.

    Raises:
        Unavailable: MPI does not start, or does not come to an end; or this is not rank 0, which
            alone gets the answer.
    """
    if rank_from_env() is None:
        mpiexec = {"path": mpiexec_path(), "vendor": None}
        launcher = mpiexec_command(mpiexec, TRIAL_RANKS, [])
        found = probe.call_in_subprocess(ranks, seconds, *launcher)
        return {"started": f"{TRIAL_RANKS} ranks, for this report", **found}
    return {"started": "by the launcher", **probe.call_in_subprocess(ranks, seconds)}


def ranks() -> dict[str, Any] | None:
    """Gather every rank's place at rank 0, and end MPI (collective).

    Returns:
        At rank 0 the places, None elsewhere.

    Raises:
        Unavailable: the launcher started several ranks, and MPI knows of one.
    """
    from mpi4py import MPI

    from chainermn_comm.gpu.cuda_aware import mpi_takes_gpu_memory
    from chainermn_comm.topology import Topology

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    level, cuda_aware = levels[MPI.Query_thread()], mpi_takes_gpu_memory()
    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    nodes = Topology.discover(world).nodes
    places = world.gather((MPI.Get_processor_name(), available_cores()["usable"]))
    MPI.Finalize()
    if rank != 0 or places is None:
        return None
    wanted = rank_from_env()
    if wanted is not None and wanted[1] != size:
        raise jobs.Unavailable(
            f"{wanted[1]} processes were started and each is rank 0 of {size}: "
            "this launcher is not that of mpi4py's MPI"
        )
    return {
        "size": size,
        "nodes": len(set(nodes)),
        "thread level": level,
        "CUDA-aware MPI": cuda_aware,
        "ranks": [
            {"rank": number, "node": node, "host": host, "cores": usable}
            for number, (node, (host, usable)) in enumerate(zip(nodes, places, strict=True))
        ],
    }
