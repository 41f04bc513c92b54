"""Which rank sits on which node, as MPI sees it.

Under `mpiexec` these are the ranks that it started; else two ranks are started to see.
"""

from __future__ import annotations

import os
from typing import Any

from chainermn_tools.environment import probe
from chainermn_tools.environment.machine import cores
from chainermn_tools.environment.mpi import mpiexec

# Where launchers tell a process its rank, and how many there are. SLURM_PROCID is none of
# them: the batch script has it too, where no MPI was started.
LAUNCHED = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
)
# As few as can show that ranks find one another.
TRIAL_RANKS = 2


def launched() -> tuple[int, int] | None:
    """This process's rank and the number of ranks, if an MPI launcher started it."""
    for rank, size in LAUNCHED:
        if os.environ.get(rank, "").isdigit():
            return int(os.environ[rank]), int(os.environ.get(size, "1"))
    return None


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
    if launched() is None:
        found = probe.in_child(ranks, seconds, mpiexec(), "-n", str(TRIAL_RANKS))
        return {"started": f"{TRIAL_RANKS} ranks, for this report", **found}
    return {"started": "by the launcher", **probe.in_child(ranks, seconds)}


def ranks() -> dict[str, Any] | None:
    """Gather every rank's place at rank 0, and end MPI (collective).

    Returns:
        At rank 0 the places, None elsewhere.

    Raises:
        Unavailable: the launcher started several ranks, and MPI knows of one.
    """
    from mpi4py import MPI

    from chainermn_comm.gpu import mpi_takes_gpu_memory
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
    places = world.gather((MPI.Get_processor_name(), cores()["usable"]))
    MPI.Finalize()
    if rank != 0 or places is None:
        return None
    wanted = launched()
    if wanted is not None and wanted[1] != size:
        raise probe.Unavailable(
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
