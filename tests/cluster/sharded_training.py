"""Trains on hosts with `sharded=True` and without: bits are equal, and no more bytes travel."""

from __future__ import annotations

import faulthandler
import signal

import chainer.functions as F
import numpy as np
from chainer.links import Linear
from chainer.optimizers import Adam
from mpi4py import MPI

from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer
from tests.cluster.every_communicator import sent_bytes
from tests.support.training.trainers import parameter_bits, same_everywhere

WIDTH = 700
# What hosts with more ranks than others send more, and handshakes.
MORE = 1.25


def train(comm, sharded):
    """Return the parameters after some updates, and what this host sends in the last one."""
    model = Linear(WIDTH, WIDTH)
    optimizer = create_multi_node_optimizer(
        Adam(), comm, overlap=False, sharded=sharded
    ).setup(model)
    random = np.random.RandomState(comm.rank)
    model.W.array = np.ones((WIDTH, WIDTH), "f")
    for _ in range(4):
        x = random.uniform(-1, 1, (4, WIDTH)).astype("f")
        MPI.COMM_WORLD.Barrier()
        before = sent_bytes()
        MPI.COMM_WORLD.Barrier()
        optimizer.update(lambda batch: F.sum(model(batch) ** 2), x)
        MPI.COMM_WORLD.Barrier()  # by now all has been received
        sent = sent_bytes() - before
    assert same_everywhere(comm, model)
    return parameter_bits(model), sent


def main():
    with create_communicator() as comm:
        bits, sent = train(comm, sharded=True)
        expected, most = train(comm, sharded=False)
        assert bits == expected
        assert sent < MORE * most
        if comm.rank == 0:
            print("RIGHT", flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    main()
