"""Checks every communicator on hosts that share neither memory nor anything but a network.

    python -m tests.cluster.every_communicator HOST ...

HOST is where each rank is to be.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from chainermn_comm import create_communicator
from tests.support.oracles import verbs
from tests.support.worlds.many_ranks import wrong_means
from tests.support.worlds.models import with_grads
from tests.support.worlds.topologies import NAMES

WORLD = MPI.COMM_WORLD
THROUGH_NODES = ("hierarchical", "two_dimensional", "non_cuda_aware")
VALUES = 1_000_003
HEADERS = 1.15  # what frames, acknowledgements and handshakes add to the bytes
WIRES = {"float32": 4 * VALUES, "float16": 2 * VALUES}


def sent_bytes() -> int:
    """What this host has sent over the network so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (row,) = [line.split() for line in lines if line.strip().startswith("eth0:")]
    return int(row[9])


def sent_for_mean(comm) -> int:
    """How many bytes this host sends for a mean of so many values."""
    model = with_grads(w=np.full(VALUES, comm.rank, "f4"))
    WORLD.Barrier()
    before = sent_bytes()
    WORLD.Barrier()
    comm.allreduce_grad(model)
    WORLD.Barrier()  # by now all has been received
    return sent_bytes() - before


def check(comm, name: str, hosts: list[str]):
    """Each rank's place, the means and what goes over the network for them, and the verbs."""
    names = list(dict.fromkeys(hosts))
    host = hosts[comm.rank]
    assert MPI.Get_processor_name() == host
    assert comm.intra_rank == hosts[: comm.rank].count(host)
    assert comm.intra_size == hosts.count(host)
    assert comm.inter_rank == names.index(host)
    assert comm.inter_size == len(names)
    # Of an allreduce between nodes: reduce-scatter, allgather.
    share = 2 * (len(names) - 1) / len(names)
    for wire, nbytes in WIRES.items():
        comm.set_config("allreduce_grad_dtype", wire)
        sent = sent_for_mean(comm)
        if name == "dummy":
            assert sent < VALUES / 5
            continue
        assert sent >= share * nbytes
        if name in THROUGH_NODES:  # the ranks of a node send nothing twice
            assert sent <= HEADERS * share * nbytes
        assert wrong_means(comm, wire, VALUES) == []
    on_cpus = [False] * comm.size
    for verb in (*verbs.MOVES, verbs.allreduce):
        verbs.check_one(comm, verb, on_cpus, "float64", "large", None)
    with comm.split(comm.rank % 2, comm.rank) as part:
        assert part.allgather_obj(comm.rank) == [*range(comm.rank % 2, comm.size, 2)]


def main(hosts: list[str]):
    for name in (*NAMES, "dummy"):
        if name == "single_node":
            with pytest.raises(ValueError, match="hierarchical"):
                create_communicator(name)
            continue
        with create_communicator(name) as comm:
            check(comm, name, hosts)
        if WORLD.rank == 0:
            print("RIGHT", name, flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    main(sys.argv[1:])
