"""Arguments for each collective method of a communicator, on any number of ranks."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from tests.support.worlds.models import with_grads

x = np.ones(3, "f4")
SIZE = MPI.COMM_WORLD.size
# On the last rank's root, rank 0 waits.
GIVEN = {
    method: tuple(given)
    for methods, *given in [
        ("bcast bcast_obj", x, None, SIZE - 1),
        ("gather allgather allreduce multi_node_mean", x),
        ("scatter alltoall reduce_scatter scatter_obj alltoall_obj", [x] * SIZE),
        ("gather_obj allgather_obj allreduce_obj", 1),
        ("bcast_data allreduce_grad", with_grads(w=x)),
        ("split", 0, 0),
    ]
    for method in methods.split()
}
